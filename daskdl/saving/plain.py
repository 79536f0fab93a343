"""Plain Python values, with tensors and frozen dataclasses among them, as JSON.

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
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daskdl.errors import OptionError, SaveError
from daskdl.saving.references import reference_to, referred
from daskdl.saving.trust import NOTHING, Trust

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
            if f.init
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
