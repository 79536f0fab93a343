"""Keys of examples: what is one, and how it is written without pickle.

A bag of pairs may be of (key, x) or of (x, y). What a pair is, is seen from its first
member: text, bytes, a UUID or a date is no input for a model.
"""

import base64
import datetime
import json
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from daskdl.data import batching
from daskdl.data.pairs import pair
from daskdl.errors import DataError

_NAMES = (str, bytes, uuid.UUID, datetime.date, np.datetime64)
_NUMBERS = (int, np.integer)
_ALLOWED = "str, bytes, int, UUID, date, datetime or a tuple of these"


def is_keyed(example: Any) -> bool:
    """Whether an example is (key, x), or (key, (x, y)), rather than (x, y) or x.

    Args:
        example: Of a bag. It is if it is a pair whose first member is text, bytes, a
            UUID or a date; or a whole number, if arrays follow; or a tuple of such.

    Example:
        >>> is_keyed(("cat-7", np.zeros(3))), is_keyed((7, np.zeros(3)))
        (True, True)
        >>> is_keyed((np.zeros(3), 7)), is_keyed((7, 1)), is_keyed(np.zeros(3))
        (False, False, False)
    """
    if not _is_pair(example):
        return False
    key, rest = example
    if not _is_key(key):
        return False
    x, _ = pair(rest)
    arrays = all(isinstance(leaf, np.ndarray | Tensor) for leaf in batching.leaves(x))
    return arrays or _is_name(key)


def split(examples: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
    """Keys and what they belong to, of pairs.

    Args:
        examples: Pairs (key, x).
        name: Of the part, for messages.

    Raises:
        DataError: If one is no pair.
    """
    for number, example in enumerate(examples):
        if not _is_pair(example):
            raise DataError(
                f"example {number} of {name} must be a pair (key, x), as the others "
                f"are, got a {type(example).__name__}; without keys give keyed=False"
            )
    return [key for key, _ in examples], [rest for _, rest in examples]


def written(keys: Sequence[Any]) -> bytes:
    """Keys as JSON, to be had back exactly.

    Raises:
        DataError: If one is of another kind.

    Example:
        >>> written(["a", (1, b"b")])
        b'["a", {"tuple": [1, {"bytes": "Yg=="}]}]'
        >>> read(written(["a", (1, b"b")]))
        ['a', (1, b'b')]
    """
    return json.dumps([_plain(key) for key in keys]).encode()


def read(content: bytes) -> list[Any]:
    """What `written` has written."""
    return [_key(plain) for plain in json.loads(content)]


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields")
    )


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_key, value))
    return isinstance(value, _NAMES + _NUMBERS) and not isinstance(value, bool)


def _is_name(key: Any) -> bool:
    """Whether a key is no number, nor only numbers."""
    if isinstance(key, tuple):
        return any(map(_is_name, key))
    return isinstance(key, _NAMES)


def _plain(key: Any) -> Any:
    if isinstance(key, np.generic):
        return {"numpy": [key.dtype.str, base64.b64encode(key.tobytes()).decode()]}
    if type(key) in (str, int, bool, float):
        return key
    if isinstance(key, tuple) and not hasattr(key, "_fields"):
        return {"tuple": [_plain(part) for part in key]}
    for kind, (cls, write, _) in _KINDS.items():
        if type(key) is cls:
            return {kind: write(key)}
    raise DataError(
        f"keys must be {_ALLOWED} to be written, got {key!r}, a {type(key).__name__}"
    )


def _key(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(_key(part) for part in content)
    if kind == "numpy":
        dtype, encoded = np.dtype(content[0]), base64.b64decode(content[1])
        # Empty text has no bytes to look at.
        return np.frombuffer(encoded, dtype)[0] if dtype.itemsize else dtype.type()
    _, _, read_one = _KINDS[kind]
    return read_one(content)


_KINDS: dict[str, tuple[type, Any, Any]] = {
    "bytes": (bytes, lambda key: base64.b64encode(key).decode(), base64.b64decode),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "datetime": (
        datetime.datetime,
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}
