"""Whose code the reader of a save vouches for.

Classes and functions by where they are imported from: ``module:Qualified.name``.

Importing a module executes it, and it may be one that came with the file. So a name in
a file imports nothing unless its reader says so: it stands for something that this
process has imported already. And it is looked at closely: nothing of the standard
library, nothing of the script that runs, and only what says itself that it has this
name there.

Plain Python values, with tensors and frozen dataclasses among them, as JSON.

What JSON has no word for is a mapping with one key that says what it is:

=========================================  ===========================================
``{"float": "nan"}``                       nan, inf or -inf; other floats are numbers
``{"tuple": [...]}``                       a tuple; a list is a list
``{"dict": [[key, value], ...]}``          a dict, in order, with any plain keys
``{"counter": [[key, count], ...]}``       a `collections.Counter`
``{"dtype": "float32"}``                   of torch
``{"tensor": "name"}``                     one of the tensors beside it
``{"object": "Class", "fields": {...}}``   a frozen dataclass, see `Plain`
=========================================  ===========================================

What makes torch's own optimizers and schedulers, read back from one just made.

So `lambda params: SGD(params, lr=0.1)` is saved as `partial(SGD, lr=0.1, ...)`. That
the two make the same is checked by making one each.

The user's classes and functions as JSON: looked up, and called, when it is read.

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

import dataclasses
import functools
import importlib
import inspect
import math
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from daskdl.data.checks import USER_ERRORS
from daskdl.errors import OptionError, SaveError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Trust:
    """Modules that may be imported, and called with arguments, because a save says so.

    Attributes:
        modules: Their names; of a package all modules that are in it.

    Example:
        >>> trust = Trust.of(["my_nets"])
        >>> trust.covers("my_nets.small"), trust.covers("my_nets_2")
        (True, False)
    """

    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Any) -> "Trust":
        """Trust modules by their names.

        Raises:
            OptionError: If it is anything but a list of such names.
        """
        several = isinstance(names, Iterable) and not isinstance(names, str | bytes)
        listed: list[Any] = list(names) if several else [None]
        if not all(isinstance(n, str) and _MODULE.fullmatch(n) for n in listed):
            raise OptionError(
                "trusted must be a list of names of modules, such as ['my_nets'], got "
                f"{names!r:.200}"
            )
        return cls(frozenset(listed))

    def covers(self, module: str) -> bool:
        """Whether it is one of the modules, or in one of them."""
        return any(f"{module}.".startswith(f"{one}.") for one in self.modules)


NOTHING = Trust()


_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
LONGEST = 500  # characters

# What a module that is imported, or a class that is called, raises at most.
FAILURES = (*USER_ERRORS, ImportError, NameError, OSError, SyntaxError)


def reference_to(value: Any) -> str:
    """Where a class or a function is imported from.

    Raises:
        OptionError: If importing it would not give this very one.

    Example:
        >>> import torch
        >>> reference_to(torch.nn.functional.mse_loss)
        'torch.nn.functional:mse_loss'
    """
    if not isinstance(value, type | FunctionType):
        kind = type(value)
        raise OptionError(
            f"a {kind.__module__}.{kind.__qualname__} is no class or function"
        )
    name = f"{value.__module__}:{value.__qualname__}"
    try:
        found = referred(name)
    except SaveError as error:
        raise OptionError(str(error)) from error
    if found is not value:
        raise OptionError(f"{name} is something else by now")
    return name


def referred(name: str, trust: Trust = NOTHING) -> Any:
    """The class or function that a name stands for.

    Args:
        name: As `reference_to` returns it, or anything else.
        trust: What may be imported for it.

    Raises:
        SaveError: If there is none, or none that may be named.
        OptionError: If its module is not imported here, and not trusted.

    Example:
        >>> referred("os:system")
        Traceback (most recent call last):
        daskdl.errors.SaveError: os:system is of the standard library, which a save \
does not name
    """
    if len(name) > LONGEST or not _FORM.fullmatch(name):
        raise SaveError(f"{name!r:.80} cannot be imported by that name")
    module, _, path = name.partition(":")
    top = module.partition(".")[0]
    if top == "__main__":
        raise SaveError(
            f"{name} is of the script or notebook that runs, which another one cannot "
            "import"
        )
    if top in sys.stdlib_module_names:
        raise SaveError(
            f"{name} is of the standard library, which a save does not name"
        )
    if module not in sys.modules and not trust.covers(module):
        raise OptionError(
            f"{name} is of a module that is not imported here; import it before, or "
            f"pass trusted=[{top!r}]"
        )
    found = _looked_up(module, path, name)
    named = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not isinstance(found, type | FunctionType) or named != (module, path):
        raise SaveError(f"{name} is no class or function of that module")
    return found


def _looked_up(module: str, path: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for step in path.split("."):
            found = inspect.getattr_static(found, step)
    except FAILURES as error:
        raise SaveError(
            f"{name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found


Json = Any
DEEPEST = 64  # levels of nesting; the deepest known, an optimizer's state, has 7


@dataclass(frozen=True)
class Plain:
    """Writes and reads values.

    A frozen dataclass is written by the name it has among `known`, or by where it is
    imported from, if it is one of `bases`. So only such a class is ever called because
    a file says so.

    Attributes:
        known: Classes by name.
        bases: What other dataclasses must derive from.
        tensors: Beside the JSON; writing adds to them.
        trust: What may be imported for other dataclasses.

    Example:
        >>> plain = Plain()
        >>> plain.encode((1, float("inf")), "betas")
        {'tuple': [1, {'float': 'inf'}]}
        >>> plain.decode({"tuple": [1, {"float": "inf"}]})
        (1, inf)
    """

    known: Mapping[str, type] = field(default_factory=dict)
    bases: tuple[type, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    trust: Trust = NOTHING

    def encode(self, value: Any, name: str, depth: int = 0) -> Json:
        """Write a value.

        Args:
            value: Read only; of tensors, the same ones go into `tensors`.
            name: Of it, for messages and for the tensors.
            depth: How deep it is in another one.

        Raises:
            OptionError: Naming what of it cannot be written.
        """
        if depth > DEEPEST:
            raise OptionError(f"{name} is nested in more than {DEEPEST} others")
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Tensor):
            return {"tensor": self._kept(value, name)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._object(value, name, depth)
        return self._container(value, name, depth)

    def _kept(self, tensor: Tensor, name: str) -> str:
        while name in self.tensors:  # "a.b" and "c" in one, "a" and "b.c" in another
            name += "'"
        self.tensors[name] = tensor
        return name

    def _object(self, value: Any, name: str, depth: int) -> Json:
        kind = type(value)
        if self.known.get(kind.__name__) is kind:
            shown = kind.__name__
        else:
            _check_frozen(kind, self.bases)
            shown = reference_to(kind)
        fields = {
            f.name: self.encode(getattr(value, f.name), f"{name}.{f.name}", depth + 1)
            for f in dataclasses.fields(value)
            if f.init and f.compare  # others, such as credentials, stay out of files
        }
        return {"object": shown, "fields": fields}

    def _container(self, value: Any, name: str, depth: int) -> Json:
        def inner(one: Any, step: Any) -> Json:
            return self.encode(one, f"{name}.{step}", depth + 1)

        if type(value) in (list, tuple):
            items = [inner(one, i) for i, one in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if type(value) in (dict, Counter):
            tag = "dict" if type(value) is dict else "counter"
            return {tag: [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
        kind = type(value)
        raise OptionError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be "
            "written without code"
        )

    def decode(self, content: Json, depth: int = 0) -> Any:
        """Read a value.

        Args:
            content: What `encode` wrote, or something damaged.
            depth: How deep it is in another one.

        Raises:
            SaveError: If `encode` does not write such a thing.
            OptionError: If it needs a module that is not imported, and not trusted.
        """
        if depth > DEEPEST:
            raise SaveError(f"something is nested in more than {DEEPEST} others")
        if content is None or type(content) in (bool, int, float, str):
            return content
        if type(content) is list:
            return [self.decode(one, depth + 1) for one in content]
        if type(content) is not dict:
            raise SaveError(f"{content!r:.80} is no plain value")
        if set(content) == {"object", "fields"}:
            return self._made(content, depth)
        if len(content) != 1:
            raise SaveError(f"a mapping has the keys {sorted(content)!r:.80}")
        ((tag, inner),) = content.items()
        return self._tagged(tag, inner, depth)

    def _tagged(self, tag: str, inner: Json, depth: int) -> Any:
        readers: dict[str, Callable[[], Any]] = {
            "float": lambda: _special(inner),
            "tuple": lambda: tuple(self.decode(_list(inner), depth + 1)),
            "dict": lambda: dict(self._pairs(inner, depth)),
            "counter": lambda: Counter(dict(self._pairs(inner, depth))),
            "dtype": lambda: _dtype(inner),
            "tensor": lambda: self._tensor(inner),
        }
        if tag not in readers:
            raise SaveError(f"nothing is written as {tag!r:.80}")
        return readers[tag]()

    def _pairs(self, inner: Json, depth: int) -> list[tuple[Any, Any]]:
        pairs = [self.decode(_list(pair), depth + 1) for pair in _list(inner)]
        for pair in pairs:
            if len(pair) != 2 or not isinstance(pair[0], str | int | float | tuple):
                raise SaveError(f"{pair!r:.80} is no key and its value")
        return [(key, value) for key, value in pairs]

    def _tensor(self, name: Json) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise SaveError(f"there is no tensor {name!r:.80}")
        return self.tensors[name]

    def _made(self, content: dict[str, Json], depth: int) -> Any:
        name, fields = content["object"], content["fields"]
        if not isinstance(name, str) or type(fields) is not dict:
            raise SaveError(f"{name!r:.80} is no name of a class")
        kind = self.known.get(name)
        if kind is None:
            kind = referred(name, self.trust)
            try:
                _check_frozen(kind, self.bases)
            except OptionError as error:
                raise SaveError(str(error)) from error
        values = {key: self.decode(one, depth + 1) for key, one in fields.items()}
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:  # OptionError too
            raise SaveError(f"{name} does not take {values!r:.200}: {error}") from error


def _special(text: Json) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise SaveError(f"{text!r:.80} is none of 'nan', 'inf' and '-inf'")
    return float(text)


def _dtype(name: Json) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise SaveError(f"{name!r:.80} is no dtype of torch")
    return dtype


def _list(content: Json) -> list[Json]:
    if type(content) is not list:
        raise SaveError(f"{content!r:.80} is no list")
    return content


def _check_frozen(kind: Any, bases: tuple[type, ...]) -> None:
    parameters = getattr(kind, "__dataclass_params__", None)
    derives = isinstance(kind, type) and issubclass(kind, bases)
    if not derives or parameters is None or not parameters.frozen:
        allowed = " or ".join(base.__name__ for base in bases) or "known class"
        raise OptionError(f"{kind!r} is no frozen dataclass that is a {allowed}")


Parameters = list[nn.Parameter]


def optimizer_maker(
    made: Optimizer, parameters: Parameters
) -> Callable[[Any], Optimizer]:
    """What makes optimizers like a new one.

    Args:
        made: Just made from the parameters.
        parameters: All that are trained.

    Returns:
        A partial of a class of `torch.optim`.

    Raises:
        OptionError: If it is of another class, has several groups of parameters, or
            is more than its class and defaults say.

    Example:
        >>> parameters = [nn.Parameter(torch.zeros(1))]
        >>> maker = optimizer_maker(torch.optim.SGD(parameters, lr=0.5), parameters)
        >>> maker.func.__name__, maker.keywords["lr"]
        ('SGD', 0.5)
    """
    kind: Any = type(made)
    _check_of(kind, torch.optim, "an optimizer")
    groups = made.param_groups
    if len(groups) != 1 or list(map(id, groups[0]["params"])) != [
        id(parameter) for parameter in parameters
    ]:
        raise OptionError(
            f"it makes a {kind.__name__} with {len(groups)} groups of parameters; only "
            "one group of all is saved"
        )
    taken = inspect.signature(kind).parameters
    keywords = {k: v for k, v in made.defaults.items() if k in taken}
    maker = functools.partial(kind, **keywords)
    _check_same(lambda: _settings(maker(parameters)), _settings(made), kind)
    return maker


def scheduler_maker(
    made: LRScheduler, fresh: Callable[[], Optimizer]
) -> Callable[[Optimizer], LRScheduler]:
    """What makes schedulers like a new one.

    Args:
        made: Just made, for an optimizer as `fresh` makes them.
        fresh: Makes a new optimizer.

    Returns:
        A partial of a class of `torch.optim.lr_scheduler`.

    Raises:
        OptionError: If it is of another class, or its class does not keep all that it
            was made with.
    """
    kind: Any = type(made)
    _check_of(kind, lr_scheduler, "a scheduler")
    maker = functools.partial(kind, **_read_back(made))
    _check_same(lambda: _standing(maker(fresh())), _standing(made), kind)
    return maker


def is_torchs_own(value: Any) -> bool:
    """Whether it is an optimizer, a scheduler or a function of torch, and only that.

    Whatever their arguments are, these compute.

    Example:
        >>> is_torchs_own(torch.optim.SGD), is_torchs_own(nn.functional.mse_loss)
        (True, True)
        >>> is_torchs_own(torch.hub.load)
        False
    """
    if isinstance(value, type):
        bases, places = (Optimizer, LRScheduler), (torch.optim, lr_scheduler)
        named = any(getattr(p, value.__name__, None) is value for p in places)
        return named and issubclass(value, bases)
    return bool(value.__module__ == nn.functional.__name__)


def _read_back(made: LRScheduler) -> dict[str, Any]:
    found = {}
    for name in inspect.signature(type(made)).parameters:
        if name in ("optimizer", "last_epoch", "verbose"):
            continue
        if name == "min_lr" and hasattr(made, "min_lrs"):
            same = len(set(made.min_lrs)) == 1
            found[name] = made.min_lrs[0] if same else list(made.min_lrs)
        elif hasattr(made, name):
            value = getattr(made, name)
            found[name] = (
                list(value.elements()) if isinstance(value, Counter) else value
            )
    return found


def _check_of(kind: type, package: Any, what: str) -> None:
    if getattr(package, kind.__name__, None) is not kind:
        raise OptionError(
            f"it makes {what} of the class {kind.__module__}.{kind.__qualname__}, "
            "which is not one of torch's own"
        )


def _check_same(again: Callable[[], Any], wanted: Any, kind: type) -> None:
    try:
        same = bool(again() == wanted)
    except FAILURES as error:
        raise OptionError(
            f"it makes a {kind.__name__} that is not made again: {error}"
        ) from error
    if not same:
        raise OptionError(
            f"it makes a {kind.__name__} of which not all arguments can be read back"
        )


def _settings(optimizer: Optimizer) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return optimizer.defaults, groups


def _standing(scheduler: LRScheduler) -> tuple[dict[str, Any], Any]:
    return scheduler.state_dict(), _settings(scheduler.optimizer)


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
