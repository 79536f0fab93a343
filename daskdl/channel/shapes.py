"""What the fields of a message have to be: the annotations of its handler say it.

Whoever reaches a port may send anything. So every field is held against its annotation
before anything looks at it, down to what is in lists and dicts; a handler then
has to refuse only what is of the right shape and makes no sense.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

COUNTS = range(2**63)  # no run has as many of anything
Whole = Annotated[int, COUNTS]
Positive = Annotated[int, range(1, 2**63)]
FromMinusOne = Annotated[int, range(-1, 2**63)]
Identity = Annotated[int, range(2**64)]  # drawn at random


def hints_of(kind: Any) -> Mapping[str, Any]:
    """The annotations of what a function takes, or of the fields of a class."""
    hints = get_type_hints(kind, include_extras=True)
    hints.pop("return", None)
    return hints


_fields_of = functools.cache(hints_of)  # of classes, which stay


def check(fields: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuse fields that are not what they have to be.

    Args:
        fields: Of a message.
        hints: What they have to be, by name; there may be more.

    Raises:
        TypeError: If a field is something else, or is not known.

    Example:
        >>> check({"step": 3, "done": -1}, {"step": Whole, "done": FromMinusOne})
        >>> check({"step": -1}, {"step": Whole})
        Traceback (most recent call last):
        TypeError: step must be int >= 0, got -1
        >>> check({"cut": [[0, "x"]]}, {"cut": Sequence[tuple[Whole, Whole]]})
        Traceback (most recent call last):
        TypeError: cut must be Sequence[tuple[int >= 0, int >= 0]], got [[0, 'x']]
    """
    for name, value in fields.items():
        if name not in hints:
            raise TypeError(f"there is no field {reprlib.repr(name)}")
        if not fits(value, hints[name]):
            wanted, got = _words(hints[name]), reprlib.repr(value)
            raise TypeError(f"{name} must be {wanted}, got {got}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that came over the wire is what an annotation says.

    There a tuple may be a list, and a NamedTuple has no names.
    """
    kind = get_origin(hint) or hint
    if kind is Any:
        return True
    if kind in SHAPES:
        return SHAPES[kind](value, get_args(hint))
    if is_typeddict(kind):
        return _fits_fields(value, _fields_of(kind))
    if inspect.isclass(kind) and issubclass(kind, tuple):
        return _fits_tuple(value, tuple(_fields_of(kind).values()))
    return isinstance(value, kind) and not isinstance(value, bool)


def _fits_bounds(value: Any, arguments: Sequence[Any]) -> bool:
    kind, allowed = arguments
    return fits(value, kind) and value in allowed


def _fits_any(value: Any, arguments: Sequence[Any]) -> bool:
    return any(fits(value, one) for one in arguments)


def _fits_tuple(value: Any, arguments: Sequence[Any]) -> bool:
    if arguments[-1] is Ellipsis:
        return _fits_sequence(value, arguments)
    return (
        isinstance(value, list | tuple)
        and len(value) == len(arguments)
        and all(map(fits, value, arguments))
    )


def _fits_sequence(value: Any, arguments: Sequence[Any]) -> bool:
    # Of a text the letters would be taken.
    each = arguments[0] if arguments else Any
    return isinstance(value, list | tuple) and all(fits(one, each) for one in value)


def _fits_mapping(value: Any, arguments: Sequence[Any]) -> bool:
    key, each = arguments or (Any, Any)
    return isinstance(value, dict) and all(
        fits(k, key) and fits(v, each) for k, v in value.items()
    )


def _fits_fields(value: Any, hints: Mapping[str, Any]) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == hints.keys()
        and all(fits(one, hints[name]) for name, one in value.items())
    )


SHAPES: Mapping[Any, Callable[[Any, Sequence[Any]], bool]] = {
    Annotated: _fits_bounds,
    Union: _fits_any,
    UnionType: _fits_any,
    tuple: _fits_tuple,
    Sequence: _fits_sequence,
    Mapping: _fits_mapping,
    dict: _fits_mapping,
    bool: lambda value, _: isinstance(value, bool),
    float: lambda value, _: fits(value, int) or isinstance(value, float),
    NoneType: lambda value, _: value is None,
}
WORDS = {
    repr(Whole): "int >= 0",
    repr(Positive): "int >= 1",
    repr(FromMinusOne): "int >= -1",
    repr(Identity): "int of 64 bits",
}


def _words(hint: Any) -> str:
    """An annotation as messages have it."""
    text = hint.__name__ if inspect.isclass(hint) else repr(hint)
    for long, short in WORDS.items():
        text = text.replace(long, short)
    return text.replace("collections.abc.", "").replace("typing.", "")
