"""Plain values, tensors, frozen dataclasses and references to code as JSON.

Decoding untrusted JSON is safe: it imports and calls only daskdl's and torch's known
classes, and modules that the caller trusts.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from daskdl.data.normalize import Normalization
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import DaskDLError, OptionError, SaveError
from daskdl.keras.compiled import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    LossOfNumbers,
    OutputLosses,
)
from daskdl.keras.module import (
    CrossEntropyOfProbabilities,
    KerasModule,
    built,
    described,
    vetted,
)

Json = Any
DEEPEST = 64  # levels of nesting; the deepest known, an optimizer's state, has 7
MAX_NAME_LENGTH = 500  # characters of the name of a class or function
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(rf"{_MODULE.pattern}:{_MODULE.pattern}")
# Raised when a module is imported or a class is called.
FAILURES = (*USER_ERRORS, ImportError, NameError, OSError, SyntaxError)


@dataclass(frozen=True)
class JsonValues:
    """Encodes and decodes values; values without a type in JSON are tagged.

    =========================================  =======================================
    ``{"float": "nan"}``                       nan, inf or -inf
    ``{"tuple": [...]}``                       a tuple; a list is a list
    ``{"dict": [[key, value], ...]}``          a dict, in order, with any plain keys
    ``{"counter": [[key, count], ...]}``       a `collections.Counter`
    ``{"dtype": "float32"}``                   of torch
    ``{"tensor": "name"}``                     one of `tensors`
    =========================================  =======================================

    Attributes:
        tensors: Tensors beside the JSON, by name; encoding adds to them.

    Example:
        >>> JsonValues().encode((1, float("inf")), "betas")
        {'tuple': [1, {'float': 'inf'}]}
        >>> JsonValues().decode({"tuple": [1, {"float": "inf"}]})
        (1, inf)
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: Any, name: str, depth: int = 0) -> Json:
        """Encode a value, with `depth` values around it.

        Tensors, and numpy arrays as tensors, are added to `tensors`, named after
        `name`; tensors are not copied.
        """

        def inner(item: Any, step: Any) -> Json:
            return self.encode(item, f"{name}.{step}", depth + 1)

        if depth > DEEPEST:
            raise OptionError(f"{name} is nested more than {DEEPEST} levels deep")
        if isinstance(value, np.generic):
            value = value.item()
        kind: Any = type(value)
        if kind in (type(None), bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is np.ndarray:
            value = torch.from_numpy(value.copy())
        if isinstance(value, Tensor):
            while name in self.tensors:  # "a.b" and "c", "a" and "b.c"
                name += "'"
            self.tensors[name] = value
            return {"tensor": name}
        if kind in (list, tuple):
            items = [inner(item, i) for i, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in (dict, Counter):
            tag = "dict" if kind is dict else "counter"
            return {tag: [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
        return self._encode_other(value, name, depth)

    def _encode_other(self, value: Any, name: str, depth: int) -> Json:
        kind = type(value)
        raise OptionError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, and a save contains "
            "neither code nor pickles"
        )

    def decode(self, content: Json, depth: int = 0) -> Any:
        """Decode a value."""
        if depth > DEEPEST:
            raise SaveError(f"a value is nested more than {DEEPEST} levels deep")
        if content is None or type(content) in (bool, int, float, str):
            return content
        if type(content) is list:
            return [self.decode(item, depth + 1) for item in content]
        try:
            ((tag, inner),) = content.items()
            return self._decode_tagged(tag, inner, depth + 1)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, DaskDLError):
                raise
            raise SaveError(f"{content!r:.80} is not an encoded value") from error

    def _decode_tagged(self, tag: str, inner: Json, depth: int) -> Any:
        match tag, inner:
            case "float", "nan" | "inf" | "-inf":
                return float(inner)
            case "tuple", list():
                return tuple(self.decode(inner, depth))
            case "dict", list():
                return dict(self._pairs(inner, depth))
            case "counter", list():
                return Counter(dict(self._pairs(inner, depth)))
            case "dtype", str() if isinstance(getattr(torch, inner), torch.dtype):
                return getattr(torch, inner)
            case "tensor", str():
                return self.tensors[inner]
        raise SaveError(f"no value has the tag {tag!r:.80} and content {inner!r:.80}")

    def _pairs(self, items: list[Json], depth: int) -> list[tuple[Any, Any]]:
        pairs = [self.decode(pair, depth + 1) for pair in items]
        if not all(isinstance(key, str | int | float | tuple) for key, _ in pairs):
            raise SaveError(
                f"keys must be strings, numbers or tuples, got {items!r:.80}"
            )
        return pairs


class UntrustedError(OptionError):
    """A save names code of a module that is not trusted."""


def trusted_modules(names: Any) -> frozenset[str]:
    """Check the argument `trusted`: names of modules and packages."""
    several = isinstance(names, Iterable) and not isinstance(names, str | bytes)
    listed: list[Any] = list(names) if several else [None]
    if not all(isinstance(n, str) and _MODULE.fullmatch(n) for n in listed):
        raise OptionError(
            "trusted must be a list of module names, such as ['my_nets'], got "
            f"{names!r:.200}"
        )
    return frozenset(listed)


# Losses that keep all their arguments, plain values and tensors, as attributes.
LOSSES: Mapping[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(vars(nn.modules.loss).values()),
        *(CrossEntropyOfProbabilities, CategoricalCrossentropy, BinaryCrossentropy),
        *(LossOfNumbers, OutputLosses),
    )
    if isinstance(kind, type)
    and kind.__module__.startswith(("torch.nn.modules.loss", "daskdl.keras."))
    and all(
        p.default is not p.empty for p in inspect.signature(kind).parameters.values()
    )
}
# Modules whose classes and functions have no side effects, whatever their arguments.
_TORCH = {
    "optim": torch.optim,
    "optim.lr_scheduler": lr_scheduler,
    "nn.functional": nn.functional,
}


@dataclass(frozen=True)
class ArgumentValues(JsonValues):
    """Encodes arguments of a trainer, including references to code.

    ===========================================  =====================================
    ``{"torch": "optim.SGD"}``                   an optimizer, scheduler or function
    ``{"loss": {"class":, "arguments":}}``       a loss of `torch.nn` or of daskdl
    ``{"normalization": ...}``                   `daskdl.data.Normalization.to_dict`
    ``{"keras": ...}``                           a Keras model, as Keras describes it
    ``{"import": "module:name"}``                another class or function
    ``{"partial": {"of":, "arguments":,          a `functools.partial`
    "keywords":}}``
    ``{"object": {"class":, "fields":}}``        another frozen dataclass
    ===========================================  =====================================

    Modules are imported, and code in them is called, only if they are trusted.

    Attributes:
        known: Frozen dataclasses of daskdl, by name.
        trusted: Names of trusted modules and packages; None: all modules, to check
            what this process has just encoded.
    """

    known: Mapping[str, type] = field(default_factory=dict)
    trusted: frozenset[str] | None = frozenset()

    @override
    def _encode_other(self, value: Any, name: str, depth: int) -> Json:
        kind: Any = type(value)
        if kind is KerasModule:
            return {"keras": described(value.keras)}
        if kind in LOSSES.values():
            arguments = self.encode(_loss_arguments(value), name, depth + 1)
            return {"loss": {"class": kind.__name__, "arguments": arguments}}
        if kind is Normalization:
            return {"normalization": value.to_dict()}
        if kind is functools.partial:
            function, arguments, keywords = (
                self.encode(part, name, depth + 1)
                for part in (value.func, list(value.args), value.keywords)
            )
            encoded = {"of": function, "arguments": arguments, "keywords": keywords}
            return {"partial": encoded}
        if isinstance(value, type | FunctionType):
            for place, module in _TORCH.items():
                if _of_torch(module, value.__name__) is value:
                    return {"torch": f"{place}.{value.__name__}"}
            return {"import": reference(value)}
        if _is_frozen(kind):
            fields = {
                f.name: self.encode(
                    getattr(value, f.name), f"{name}.{f.name}", depth + 1
                )
                for f in dataclasses.fields(value)
                if f.init and f.compare  # others, such as credentials, are never saved
            }
            known = kind in self.known.values()
            class_name = kind.__name__ if known else reference(kind)
            return {"object": {"class": class_name, "fields": fields}}
        return super()._encode_other(value, name, depth)

    @override
    def _decode_tagged(self, tag: str, inner: Json, depth: int) -> Any:
        match tag, inner:
            case "keras", dict():
                return KerasModule(built(vetted(inner), seeded=False))
            case "loss", {"class": str(name), "arguments": arguments}:
                return _constructed(LOSSES[name], self.decode(arguments, depth))
            case "normalization", dict():
                return Normalization.from_dict(inner)
            case "torch", str():
                place, _, name = inner.rpartition(".")
                of_torch = _of_torch(_TORCH[place], name)
                if of_torch is not None:
                    return of_torch
            case "import", str():
                return self._imported(inner)
            case "partial", {"of": of, "arguments": list(values), "keywords": keywords}:
                return functools.partial(
                    self.decode(of, depth),
                    *self.decode(values, depth),
                    **self.decode(keywords, depth),
                )
            case "object", {"class": str(name), "fields": dict(fields)}:
                kind = self.known.get(name) or self._imported(name)
                if not _is_frozen(kind):
                    raise SaveError(f"{name} is not a frozen dataclass")
                return _constructed(
                    kind, {k: self.decode(v, depth) for k, v in fields.items()}
                )
        return super()._decode_tagged(tag, inner, depth)

    def _imported(self, name: str) -> Any:
        """Import a class or function, if its module is trusted."""
        check_name(name)
        module = name.partition(":")[0]
        trusted = self.trusted
        if trusted is not None and not any(
            f"{module}.".startswith(f"{allowed}.") for allowed in trusted
        ):
            top = module.partition(".")[0]
            raise UntrustedError(
                f"loading would import and call {name}; if you trust this code, pass "
                f"trusted=[{top!r}]"
            )
        return imported(name)


def check_name(name: str) -> None:
    """Refuse names that cannot refer to the user's own modules.

    Example:
        >>> check_name("os:system")
        Traceback (most recent call last):
        daskdl.errors.SaveError: os:system is in the standard library, to which a save \
never refers
    """
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise SaveError(f"{name!r:.80} cannot be imported by that name")
    top = re.split("[.:]", name)[0]
    if top == "__main__":
        raise SaveError(
            f"{name} is defined in your script or notebook, so it cannot be imported "
            "by name"
        )
    if top in sys.stdlib_module_names:
        raise SaveError(
            f"{name} is in the standard library, to which a save never refers"
        )


def imported(name: str) -> Any:
    """Import a class or function by its ``module:qualname``."""
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for step in path.split("."):
            value = inspect.getattr_static(value, step)
    except FAILURES as error:
        raise SaveError(
            f"{name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, type | FunctionType) or (
        (value.__module__, value.__qualname__) != (module, path)
    ):
        raise SaveError(f"{name} is not a class or function of that module")
    return value


def reference(value: type | FunctionType) -> str:
    """Return the name by which `imported` finds a class or function."""
    name = f"{value.__module__}:{value.__qualname__}"
    try:
        check_name(name)
        value_of_name = imported(name)
    except SaveError as error:
        raise OptionError(str(error)) from error
    if value_of_name is not value:
        raise OptionError(f"{name} now refers to another object")
    return name


def _of_torch(place: Any, name: str) -> Any:
    value = getattr(place, name, None)
    if isinstance(value, type):
        return value if issubclass(value, Optimizer | LRScheduler) else None
    functional = (
        isinstance(value, FunctionType) and value.__module__ == "torch.nn.functional"
    )
    return value if functional else None


def _is_frozen(kind: Any) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return isinstance(kind, type) and parameters is not None and parameters.frozen


def _constructed(kind: type, arguments: Mapping[str, Any]) -> Any:
    try:
        return kind(**arguments)
    except USER_ERRORS as error:  # includes OptionError
        raise SaveError(
            f"{kind.__name__} does not accept {arguments!r:.200}: {error}"
        ) from error


def _loss_arguments(loss: nn.Module) -> dict[str, Any]:
    """Read the arguments of a loss from its attributes.

    Raises:
        OptionError: If a loss with these arguments has other attributes.
    """
    kind = type(loss)
    # The deprecated arguments are not kept: the constructor sets `reduction` from them.
    names = inspect.signature(kind).parameters.keys() - {"size_average", "reduce"}
    arguments = {name: getattr(loss, name) for name in sorted(names)}
    current, reconstructed = (
        {**vars(module), "_buffers": dict(module.named_buffers()).keys()}
        | {"training": True}
        for module in (loss, kind(**arguments))
    )
    missing = inspect.Parameter.empty
    for name in current.keys() | reconstructed.keys():
        if current.get(name, missing) != reconstructed.get(name, missing):
            raise OptionError(
                f"the loss has an attribute {name} that no argument of "
                f"{kind.__name__} sets"
            )
    return arguments
