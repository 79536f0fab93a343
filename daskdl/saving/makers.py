"""The user's classes and functions as JSON: looked up, and called, when it is read.

=============================================================  =======================
``{"import": "module:name"}``                                  a class or a function
``{"partial": "module:name", "arguments": [...],               a `functools.partial` of
"keywords": {"dict": ...}}``                                   one, arguments as in
                                                               :mod:`.plain`
=============================================================  =======================

Whoever writes a file could name any function of any library there. So what is called
must say itself what it makes: a class by what it derives from, a function by its return
annotation. That is not enough where a file has the arguments too: among what makes
modules are functions that execute their arguments, `torch.fx` has one, and classes that
fetch code from where these say. Those have to be trusted, or torch's own.
"""

import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from daskdl.errors import OptionError, SaveError
from daskdl.saving.plain import Json, Plain
from daskdl.saving.references import reference_to, referred
from daskdl.saving.torch_makers import is_torchs_own

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
        _check_class(value, base)
        return {"import": reference}
    reference = reference_to(value.func)
    _check_class(value.func, base)
    _check_says(value.func, base)
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
        plain: Reads the arguments, and knows what is trusted.

    Raises:
        SaveError: If there is no such maker, or none that may be called.
        OptionError: If it has to be trusted, and is not.
    """
    try:
        if set(content) == {"import"}:
            return _found(content["import"], base, plain)
        maker = _found(content["partial"], base, plain, with_arguments=True)
        arguments = plain.decode(content["arguments"])
        keywords = plain.decode(content["keywords"])
        if not all(isinstance(name, str) for name in keywords):
            raise SaveError(f"{keywords!r:.80} are no arguments by name")
        return functools.partial(maker, *arguments, **keywords)
    except (TypeError, KeyError) as error:
        raise SaveError(f"{content!r:.80} names no class or function") from error


def _found(name: Json, base: type, plain: Plain, with_arguments: bool = False) -> Maker:
    if not isinstance(name, str):
        raise SaveError(f"{name!r:.80} is no name of a class or function")
    value: Maker = referred(name, plain.trust)
    try:
        _check_class(value, base)
        if with_arguments:
            _check_says(value, base)
    except OptionError as error:
        raise SaveError(str(error)) from error
    if not plain.trust.covers(value.__module__):
        _check_harmless(value, base, with_arguments)
    return value


def _check_class(value: Any, base: type) -> None:
    if isinstance(value, type) and not issubclass(value, base):
        raise OptionError(f"{_shown(value)} is no {base.__name__}")


def _check_says(value: Any, base: type) -> None:
    if not isinstance(value, type) and not _returns(value, base):
        raise OptionError(
            f"{_shown(value)} has arguments and no return annotation of a "
            f"{base.__name__}"
        )


def _check_harmless(value: Any, base: type, with_arguments: bool) -> None:
    """Refuse to call what nobody trusts, with arguments or whatever it makes.

    Raises:
        OptionError: Naming it, and what is allowed.
    """
    if with_arguments and not is_torchs_own(value):
        why = "would be called with arguments from the save"
    elif not isinstance(value, type) and not _returns(value, base):
        why = f"has no return annotation of a {base.__name__}"
    else:
        return
    raise OptionError(
        f"{_shown(value)} {why}; if it may be called, pass "
        f"trusted=[{value.__module__!r}]"
    )


def _shown(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _returns(function: Callable[..., Any], base: type) -> bool:
    # Of the others some may be there for type checkers only.
    own = types.SimpleNamespace(
        __annotations__={"return": function.__annotations__.get("return")}
    )
    try:
        said: Any = typing.get_type_hints(own, function.__globals__)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return False
    said = said["return"]
    said = typing.get_origin(said) or said  # tuple of tuple[Tensor, Tensor]
    return isinstance(said, type) and issubclass(said, base)
