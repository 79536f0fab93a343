"""The user's classes and functions as JSON: imported, and called, when it is read.

=============================================================  =======================
``{"import": "module:name"}``                                  a class or a function
``{"partial": "module:name", "arguments": [...],               a `functools.partial` of
"keywords": {"dict": ...}}``                                   one, arguments as in
                                                               :mod:`.plain`
=============================================================  =======================
"""

import functools
import typing
from collections.abc import Callable
from typing import Any

from daskdl.errors import OptionError, SaveError
from daskdl.saving.plain import Json, Plain
from daskdl.saving.references import reference_to, referred

Maker = Callable[..., Any]


def encode_maker(value: Any, base: type, plain: Plain, name: str) -> Json:
    """Write what makes a thing of some kind.

    Args:
        value: A class, a function, or a partial of one.
        base: Of what it makes.
        plain: Writes the arguments.
        name: Of the trainer's argument.

    Raises:
        OptionError: If reading it would not give the same; the message says why.

    Example:
        >>> import torch
        >>> encode_maker(torch.nn.ReLU, torch.nn.Module, Plain(), "model")
        {'import': 'torch.nn.modules.activation:ReLU'}
    """
    if type(value) is not functools.partial:
        reference = reference_to(value)
        _check_maker(value, base, called_with_more=False)
        return {"import": reference}
    reference = reference_to(value.func)
    _check_maker(value.func, base, called_with_more=True)
    return {
        "partial": reference,
        "arguments": plain.encode(list(value.args), name),
        "keywords": plain.encode(dict(value.keywords), name),
    }


def decode_maker(content: Json, base: type, plain: Plain) -> Maker:
    """Read what makes a thing of some kind; it is not called yet.

    Args:
        content: What `encode_maker` wrote, or something damaged.
        base: Of what it makes.
        plain: Reads the arguments.

    Raises:
        SaveError: If there is no such maker, or none that may be called.
    """
    try:
        if set(content) == {"import"}:
            return _of(content["import"], base, called_with_more=False)
        maker = _of(content["partial"], base, called_with_more=True)
        arguments = plain.decode(content["arguments"])
        keywords = plain.decode(content["keywords"])
        if not all(isinstance(name, str) for name in keywords):
            raise SaveError(f"{keywords!r:.80} are no arguments by name")
        return functools.partial(maker, *arguments, **keywords)
    except (TypeError, KeyError) as error:
        raise SaveError(f"{content!r:.80} names no class or function") from error


def _of(name: Json, base: type, called_with_more: bool) -> Maker:
    if not isinstance(name, str):
        raise SaveError(f"{name!r:.80} is no name of a class or function")
    value: Maker = referred(name)
    try:
        _check_maker(value, base, called_with_more)
    except OptionError as error:
        raise SaveError(str(error)) from error
    return value


def _check_maker(value: Any, base: type, called_with_more: bool) -> None:
    """Refuse a class or function that is not there to make a thing of some kind.

    What is called with arguments from a file must say itself that it makes such a
    thing: a class by what it derives from, a function by its return annotation. Else a
    file could call any function with anything.

    Args:
        value: A class or a function.
        base: Of what it makes.
        called_with_more: Whether some of its arguments are from the file.

    Raises:
        OptionError: Naming it, and what is allowed.
    """
    shown = f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, type):
        if not issubclass(value, base):
            raise OptionError(f"{shown} is no {base.__name__}")
        return
    if called_with_more and not _returns(value, base):
        raise OptionError(
            f"{shown} has arguments and no return annotation of a {base.__name__}"
        )


def _returns(function: Callable[..., Any], base: type) -> bool:
    try:
        said: Any = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return False
    said = typing.get_origin(said) or said  # tuple of tuple[Tensor, Tensor]
    return isinstance(said, type) and issubclass(said, base)
