"""Labels that are names: each becomes its place among the classes."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from daskdl.errors import DataError

_SHOWN = 10


def as_indices(
    labels: Iterable[str | None], classes: Sequence[str], where: str
) -> np.ndarray:
    """The place of each label among the classes, as int64; with gaps, as float64.

    Args:
        labels: Names; None: there is none, which becomes NaN.
        classes: All names there may be.
        where: What has the labels, for the message: a column of a file.

    Raises:
        DataError: With a label that is not among the classes, and its row.

    Example:
        >>> as_indices(["b", "a"], ["a", "b"], "y")
        array([1, 0])
        >>> as_indices(["c"], ["a", "b"], "the column 'y' of x.csv")
        Traceback (most recent call last):
        daskdl.errors.DataError: the column 'y' of x.csv has the label 'c' in row 0, \
which is not among the classes 'a', 'b'
    """
    places = {name: place for place, name in enumerate(classes)}
    rows: list[float] = []
    for row, label in enumerate(labels):
        if label is None:
            rows.append(math.nan)
            continue
        if label not in places:
            raise DataError(
                f"{where} has the label {label!r} in row {row}, which is not among "
                f"the classes {listed(classes)}"
            )
        rows.append(places[label])
    return np.array(rows, np.float64 if math.nan in rows else np.int64)


def listed(names: Iterable[object]) -> str:
    """Names for a message; of many the first ones.

    Example:
        >>> listed(["a", "b"])
        "'a', 'b'"
    """
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
