"""What a column may be: which pandas dtypes are numbers, and what to do with others.

Dtypes only; values are looked at in :mod:`daskdl.data.frames.columns`. What pandas
keeps in numpy, in pyarrow or with a mask has the same ``kind`` here.
"""

from enum import Enum
from typing import Any, NamedTuple

import numpy as np

SHOWN_NAMES = 5  # of categories, in a message
LARGEST_ITEM_BYTES = 8
_UNKNOWN = "__UNKNOWN_CATEGORIES__"  # what Dask writes where it would have to compute


class Kind(Enum):
    """What a dtype holds, as far as it matters here."""

    NUMBERS = "numbers"  # booleans too, and categories that are numbers
    NAMES = "names"  # categories that are not numbers
    UNKNOWN = "categories that are not known"
    STRINGS = "strings"
    DATES = "dates"
    DURATIONS = "durations"
    OTHER = "other values"


class Place(NamedTuple):
    """Where a column is, for messages."""

    words: str  # column 'a' of X
    code: str  # X['a']


def kind_of(dtype: Any) -> Kind:
    """What a column of this pandas dtype holds.

    Example:
        >>> kind_of(np.dtype("float32")), kind_of(np.dtype("M8[ns]"))
        (<Kind.NUMBERS: 'numbers'>, <Kind.DATES: 'dates'>)
    """
    if hasattr(dtype, "categories"):
        if _UNKNOWN in dtype.categories:
            return Kind.UNKNOWN
        numbers = kind_of(dtype.categories.dtype) is Kind.NUMBERS
        return Kind.NUMBERS if numbers else Kind.NAMES
    if dtype.kind in "biuf" and np.dtype(plain(dtype)).itemsize <= LARGEST_ITEM_BYTES:
        return Kind.NUMBERS
    if dtype.type is str:
        return Kind.STRINGS
    if dtype.kind == "M" or str(dtype).startswith("period"):
        return Kind.DATES
    return Kind.DURATIONS if dtype.kind == "m" else Kind.OTHER


def plain(dtype: Any) -> Any:
    """The numpy dtype of the numbers that a column holds."""
    return getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype))


def refusal(dtype: Any, place: Place, label: bool) -> str | None:
    """Why a column cannot be used, and the remedy; None if it can.

    Args:
        dtype: Of the column, in pandas.
        place: For the message.
        label: Whether it is the label column, which may have names.
    """
    kind = kind_of(dtype)
    if kind is Kind.NUMBERS or (label and kind is Kind.NAMES):
        return None
    code = place.code
    if kind is Kind.NAMES:
        return (
            f"{place.words} is categorical with the categories "
            f"{few(dtype.categories)}; encode it as numbers, for example with "
            f"{code}.cat.codes"
        )
    if kind is Kind.UNKNOWN:
        return (
            f"{place.words} is categorical with categories that are not known yet; "
            f"use {code}.cat.as_known(), which computes them"
        )
    remedy = {
        Kind.STRINGS: "make them categories, for example with "
        f"{code}.astype('category')"
        if label
        else "encode them as numbers, for example with "
        f"{code}.astype('category').cat.codes",
        Kind.DATES: "turn them into numbers, for example with "
        f"({code} - {code}.min()).dt.total_seconds()",
        Kind.DURATIONS: f"turn them into numbers with {code}.dt.total_seconds()",
        Kind.OTHER: "convert them to real numbers of at most 64 bits, for example "
        f"with {code}.astype('float32')",
    }[kind]
    return f"{place.words} holds {kind.value} ({dtype}); {remedy}"


def few(names: Any) -> str:
    """The first of some names, for messages.

    Example:
        >>> few(["a", "b"]), few(range(9)), few(None)
        ("'a', 'b'", '0, 1, 2, 3, 4 and 4 more', 'none')
    """
    if names is None:
        return "none"
    shown = ", ".join(repr(name) for name in names[:SHOWN_NAMES])
    more = len(names) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
