"""Modules of `torch.nn` described by class and arguments, without their tensors.

==========================================================  ==========================
``{"class": "Linear", "arguments": {"dict": [...]}}``       a layer or a loss
``{"class": "Sequential", "children": [[name, ...], ...]}`` a container
``{"same": "0.1"}``                                         the module at that path
==========================================================  ==========================

What a module was made with is read from its attributes. That it is all of what makes
it up is not believed: it is built again and compared, attribute by attribute.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from daskdl.errors import OptionError, SaveError
from daskdl.saving.differences import difference
from daskdl.saving.plain import DEEPEST, Json, Plain
from daskdl.saving.references import FAILURES

CONTAINERS: Mapping[str, Callable[[Mapping[str, nn.Module]], nn.Module]] = {
    "Sequential": lambda children: nn.Sequential(OrderedDict(children)),
    "ModuleDict": lambda children: nn.ModuleDict(dict(children)),
    "ModuleList": lambda children: nn.ModuleList(list(children.values())),
}
# Files of `torch.nn.modules` whose classes are single layers and losses, of plain
# arguments. Not those that make as many layers as a number says.
_FAMILIES = frozenset(
    [
        "activation",
        "batchnorm",
        "channelshuffle",
        "conv",
        "distance",
        "dropout",
        "flatten",
        "fold",
        "instancenorm",
        "linear",
        "loss",
        "normalization",
        "padding",
        "pixelshuffle",
        "pooling",
        "rnn",
        "sparse",
        "upsampling",
    ]
)
MOST_LAYERS = 1000  # of one recurrent module: a file must not ask for millions
# Where the argument is not the attribute of that name, or there is none.
_READ_BACK: Mapping[str, Callable[[nn.Module], Any]] = {
    "MultiheadAttention.bias": lambda m: m.in_proj_bias is not None,
    "MultiheadAttention.add_bias_kv": lambda m: m.bias_k is not None,
}
_RECURRENT = (  # whose signature is *args, **kwargs
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
)
_OF_ONE = {"LSTM": ("proj_size",), "RNN": ("nonlinearity",)}


def describe(module: nn.Module, name: str) -> Json:
    """Describe a module, so that `build` makes one like it.

    Args:
        module: Any; not changed.
        name: For messages.

    Raises:
        OptionError: Naming the part that is not described by class and arguments.

    Example:
        >>> describe(nn.Softmax(dim=1), "model")
        {'class': 'Softmax', 'arguments': {'dict': [['dim', 1]]}}
    """
    plan = _described(module, name, {})
    try:
        found = difference(module, build(plan))
    except SaveError as error:
        raise OptionError(f"{name} cannot be built again: {error}") from error
    if found is not None:
        raise OptionError(f"{name}{found}")
    return plan


def build(plan: Json) -> nn.Module:
    """Make a module as described, on torch's meta device: no memory, no numbers.

    Raises:
        SaveError: If it describes none.

    Example:
        >>> build(describe(nn.Linear(2, 1), "model")).weight.device
        device(type='meta')
    """
    with torch.device("meta"):
        return _built(plan, "", {}, 0)


def _described(module: nn.Module, path: str, seen: dict[int, str]) -> Json:
    if id(module) in seen:
        return {"same": seen[id(module)].partition(".")[2]}
    seen[id(module)] = path
    kind = type(module)
    if kind.__name__ in CONTAINERS and getattr(nn, kind.__name__) is kind:
        children = [
            [name, _described(child, f"{path}.{name}", seen)]
            for name, child in module._modules.items()
            if child is not None
        ]
        return {"class": kind.__name__, "children": children}
    if not _is_leaf(kind):
        raise OptionError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which is no layer or "
            "container of torch.nn"
        )
    return {"class": kind.__name__, "arguments": _arguments(module, path)}


def _is_leaf(kind: Any) -> bool:
    found: Any = getattr(nn, getattr(kind, "__name__", ""), None)
    if found is not kind or not isinstance(found, type):
        return False
    layer = issubclass(kind, nn.Module) and not issubclass(kind, LazyModuleMixin)
    package, _, family = kind.__module__.rpartition(".")
    return layer and package == "torch.nn.modules" and family in _FAMILIES


def _arguments(module: nn.Module, path: str) -> Json:
    kind: Any = type(module)
    found = {}
    for name in _names(kind):
        read = _READ_BACK.get(f"{kind.__name__}.{name}")
        if read is not None:
            found[name] = read(module)
        elif hasattr(module, name):
            found[name] = _value(name, getattr(module, name))
    return Plain().encode(found, path)


def _value(name: str, attribute: Any) -> Any:
    if name == "bias":
        return attribute is not None and attribute is not False
    # The tensor comes with the others: class weights, for one.
    return None if isinstance(attribute, Tensor) else attribute


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, nn.RNNBase):
        return (*_RECURRENT, *_OF_ONE.get(kind.__name__, ()))
    names = inspect.signature(kind).parameters
    # Deprecated in losses; where tensors are comes with them.
    left_out = {"device", "dtype", "size_average", "reduce"}
    return tuple(n for n in names if n not in left_out and not n.startswith("_"))


def _built(plan: Json, path: str, seen: dict[str, nn.Module], depth: int) -> nn.Module:
    if not isinstance(plan, dict) or depth > DEEPEST:
        raise SaveError(f"the layer at {path!r} is described by {plan!r:.80}")
    if set(plan) == {"same"}:
        return _same(plan["same"], path, seen)
    kind = plan.get("class")
    if not isinstance(kind, str):
        raise SaveError(f"the layer at {path!r} is of the class {kind!r:.80}")
    if kind in CONTAINERS:
        made = _container(plan, path, seen, depth)
    else:
        made = _leaf(kind, plan.get("arguments"), path)
    seen[path] = made
    return made


def _same(path: Json, own: str, seen: Mapping[str, nn.Module]) -> nn.Module:
    if not isinstance(path, str) or path not in seen:
        raise SaveError(f"the layer at {own!r} is the same as {path!r:.80}")
    return seen[path]


def _container(
    plan: Mapping[str, Json], path: str, seen: dict[str, nn.Module], depth: int
) -> nn.Module:
    try:
        children = {
            name: _built(child, f"{path}.{name}".lstrip("."), seen, depth + 1)
            for name, child in plan["children"]
        }
        made = CONTAINERS[plan["class"]](children)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(f"the layers of {path!r} are damaged: {error}") from error
    if list(made._modules) != list(children):
        raise SaveError(f"the layers of {path!r} are called {list(children)!r:.80}")
    return made


def _leaf(name: str, encoded: Json, path: str) -> nn.Module:
    kind: Any = getattr(nn, name, None)
    if not _is_leaf(kind):
        raise SaveError(f"the layer at {path!r} is a {name!r:.80}, not of torch.nn")
    arguments = Plain().decode(encoded)
    # No others: one is a device, on which there would be memory.
    known = isinstance(arguments, dict) and arguments.keys() <= set(_names(kind))
    layers = arguments.get("num_layers", 1) if known else None
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise SaveError(f"the layer at {path!r} has the arguments {encoded!r:.200}")
    try:
        made: nn.Module = kind(**arguments)
    except FAILURES as error:
        raise SaveError(
            f"the layer at {path!r} is no {name} of {arguments!r:.200}: {error}"
        ) from error
    return made
