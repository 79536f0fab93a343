"""What an export is made from: enough to tell another one, without going through it.

Data are told by the token that Dask gives them where it always gives the same one:
names of lazy collections, contents of what is in memory. Where it cannot (objects
that are made anew in every session), by the number of parts and rows alone.
"""

from collections.abc import Mapping
from typing import Any

from dask.base import tokenize
from dask.delayed import Delayed
from dask.tokenize import TokenizationError
from torch import Tensor

from daskdl.data.arrays import as_numpy
from daskdl.data.source import Source


def token_of(value: Any) -> str | None:
    """What tells a value from others, also in another session; None: nothing does.

    Example:
        >>> import numpy as np
        >>> token_of((np.arange(3), None)) == token_of((np.arange(3), None))
        True
        >>> token_of(object()) is None
        True
    """
    try:
        token: str = tokenize(_plain(value), ensure_deterministic=True)
    except TokenizationError:
        return None
    return token


def origin_of(source: Source, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an export, as plain values for JSON.

    Args:
        source: Its parts.
        data: What the user gave, to be told by its token.
        options: Plain values, which decide what the files look like.
    """
    lengths = source.lengths
    return {
        "data": token_of(data),
        "parts": source.parts,
        "rows": None if lengths is None else int(sum(lengths)),
        **options,
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What makes two exports different, for a message; empty if nothing does.

    Example:
        >>> differences({"seed": 0, "parts": 3}, {"seed": 1, "parts": 3})
        'seed was 0 and is 1'
    """
    keys = sorted(old.keys() | new.keys())
    return ", ".join(
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in keys
        if old.get(key) != new.get(key)
    )


def _plain(value: Any) -> Any:
    """Without what has another token in each session although it is the same."""
    if isinstance(value, Tensor):
        return as_numpy(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Delayed) or type(value).__module__ == "distributed.client":
        return type(value).__name__  # its key is another one each time
    return value
