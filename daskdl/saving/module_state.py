"""The state of a module: everything that its code does not make anew.

What makes two modules behave differently, besides the values of their tensors.

Modules of `torch.nn` described by class and arguments, without their tensors.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from daskdl.errors import OptionError, SaveError
from daskdl.saving.json_values import DEEPEST, FAILURES, Json, Plain
from daskdl.serialization import MAKER


@dataclass(frozen=True)
class ModuleState:
    """Tensors of a module, and how they hang together.

    Attributes:
        tensors: Its state dict; of tied tensors the first.
        hidden: Buffers that are not in the state dict.
        ties: The other names of tied tensors, and under which name they are.
        frozen: Names of parameters that are not trained.
        evaluating: Paths of modules that are not in training mode.
    """

    tensors: Mapping[str, Tensor]
    hidden: Mapping[str, Tensor]
    ties: Mapping[str, str]
    frozen: Sequence[str]
    evaluating: Sequence[str]

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleState":
        """Look at a module; the tensors are its own, not copies.

        Raises:
            OptionError: Naming what of its state is no tensor.
        """
        whole: dict[str, Any] = module.state_dict(keep_vars=True)
        for name, value in whole.items():
            if not isinstance(value, Tensor):
                raise OptionError(
                    f"{name} of the model's state is a {type(value).__name__}; only "
                    "tensors can be saved"
                )
        hidden = {
            name: buffer for name, buffer in module.named_buffers() if name not in whole
        }
        first: dict[int, str] = {}
        ties: dict[str, str] = {}
        for name, tensor in whole.items():
            one = first.setdefault(id(tensor), name)
            if one != name:
                ties[name] = one
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        evaluating = [n for n, m in module.named_modules() if not m.training]
        own = {n: t.detach() for n, t in whole.items() if n not in ties}
        return cls(own, hidden, ties, frozen, evaluating)

    @classmethod
    def from_json(
        cls, content: Json, tensors: Mapping[str, Tensor], hidden: Mapping[str, Tensor]
    ) -> "ModuleState":
        """Put together what `to_json` returned and the tensors.

        Raises:
            SaveError: If it is damaged.
        """
        ties = content["ties"]
        if not isinstance(ties, dict) or not set(ties.values()) <= set(tensors):
            raise SaveError(f"{ties!r:.200} are no names of tied tensors")
        lists = [content["frozen"], content["evaluating"]]
        if not all(isinstance(n, list) and set(map(type, n)) <= {str} for n in lists):
            raise SaveError(f"{lists!r:.200} are no lists of names")
        return cls(tensors, hidden, ties, *lists)

    def to_json(self) -> Json:
        """All but the tensors."""
        return {
            "ties": dict(self.ties),
            "frozen": list(self.frozen),
            "evaluating": list(self.evaluating),
        }

    def whole(self) -> dict[str, Tensor]:
        """The state dict, with tied tensors under all of their names."""
        tied = {name: self.tensors[one] for name, one in self.ties.items()}
        return {**self.tensors, **tied}

    def load_into(self, module: nn.Module) -> None:
        """Give a module made by the user's code this state.

        Args:
            module: Changed in place.

        Raises:
            SaveError: Naming what of it differs from the module that was saved.
        """
        try:
            own = ModuleState.of(module)
        except OptionError as error:
            raise SaveError(str(error)) from error
        _check_alike(self, own)
        slots = _slots(self, own, module)
        try:
            module.load_state_dict(self.whole())
        except FAILURES as error:
            raise SaveError(f"the model refuses its state: {error}") from error
        for name, (owner, leaf) in slots.items():
            setattr(owner, leaf, self.hidden[name])
        self._set_modes(module)

    def put_into(self, module: nn.Module) -> None:
        """Give a module on the meta device this state, the tensors themselves.

        Args:
            module: As `layers.build` makes it; changed in place.

        Raises:
            SaveError: Naming a tensor that is missing, or of another shape.
        """
        made: dict[str, Tensor] = {}
        for name, tensor in {**self.whole(), **self.hidden}.items():
            owner, leaf = _owner(module, name)
            one = self.ties.get(name, name)
            if leaf in owner._parameters:
                _check_shape(name, tensor, owner._parameters[leaf])
                trained = one not in self.frozen
                if trained and not tensor.dtype.is_floating_point:
                    raise SaveError(f"parameter {name} is {tensor.dtype}")
                made.setdefault(one, nn.Parameter(tensor, requires_grad=trained))
            else:
                if leaf not in owner._buffers:
                    raise SaveError(f"the layers have no tensor {name}")
                _check_shape(name, tensor, owner._buffers[leaf])
                made.setdefault(one, tensor)
            setattr(owner, leaf, made[one])
        missing = [n for n, t in _all_tensors(module).items() if t.is_meta]
        if missing:
            raise SaveError(f"there is no tensor {missing[0]}")
        self._set_modes(module)

    def _set_modes(self, module: nn.Module) -> None:
        frozen, evaluating = set(self.frozen), set(self.evaluating)
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(name not in frozen)
        for name, part in module.named_modules():
            part.training = name not in evaluating


def _check_alike(saved: ModuleState, own: ModuleState) -> None:
    ours, theirs = saved.whole(), own.whole()
    for name in {**theirs, **ours}:  # in the order of the model
        if name not in theirs or name not in ours:
            where = "the model" if name in ours else "the save"
            raise SaveError(f"there is no {name} in {where}; it is of another model")
        one, other = ours[name], theirs[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            raise SaveError(
                f"{name} is {_shown(one)} in the save, and {_shown(other)} in the model"
            )
    if dict(saved.ties) != dict(own.ties):
        (name, *_) = sorted(set(saved.ties.items()) ^ set(own.ties.items()))[0]
        raise SaveError(f"{name} is tied in one of the save and the model, not in both")


def _slots(
    saved: ModuleState, own: ModuleState, module: nn.Module
) -> dict[str, tuple[nn.Module, str]]:
    """Where hidden buffers belong; what is None yet, or has grown, is a place too."""
    slots = {name: _owner(module, name) for name in saved.hidden}
    for name, (owner, leaf) in slots.items():
        if name in own.tensors or leaf not in owner._buffers:
            raise SaveError(f"there is no buffer {name} in the model")
    return slots


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError as error:
        raise SaveError(f"the layers have no tensor {name!r:.200}") from error


def _check_shape(name: str, tensor: Tensor, slot: Tensor | None) -> None:
    if slot is not None and slot.shape != tensor.shape:
        raise SaveError(
            f"{name} is {_shown(tensor)} in the save, and {_shown(slot)} by its layer"
        )


def _all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# In every module, and compared by themselves; lists of a recurrent one's parameters.
_NOT_COMPARED = frozenset(
    {"_parameters", "_buffers", "_modules", "training"}
    | {"_flat_weights", "_flat_weight_refs", MAKER}
)


def difference(module: nn.Module, rebuilt: nn.Module) -> str | None:
    """In what two modules differ, besides the values and dtypes of their tensors.

    Args:
        module: That is to be saved.
        rebuilt: Of its layers' arguments.

    Returns:
        What is to be put after the name of the module; None: they are alike.

    Example:
        >>> difference(nn.ReLU(inplace=True), nn.ReLU())
        ' has a value of inplace that its arguments do not make'
    """
    ours = dict(module.named_modules(remove_duplicate=False))
    theirs = dict(rebuilt.named_modules(remove_duplicate=False))
    for path, one in ours.items():
        shown = f".{path}" if path else ""
        other = theirs.get(path)
        if other is None or type(other) is not type(one):
            return f"{shown} is a {type(one).__name__} that its arguments do not make"
        found = _attribute(one, other) or _tensor(one, other)
        if found is not None:
            return f"{shown} has {found} that its arguments do not make"
    return None if len(ours) == len(theirs) else " has fewer layers"


def _attribute(one: nn.Module, other: nn.Module) -> str | None:
    ours, theirs = (
        {k: v for k, v in vars(m).items() if k not in _NOT_COMPARED}
        for m in (one, other)
    )
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            return f"an attribute {name}"
        if not _equal(ours[name], theirs[name]):
            return f"a value of {name}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _tensor(one: nn.Module, other: nn.Module) -> str | None:
    for name in {**one._parameters, **other._parameters}:
        if _shape(one._parameters, name) != _shape(other._parameters, name):
            return f"a parameter {name}"
    for name in {**one._buffers, **other._buffers}:
        # One that is None there is a slot, into which the tensor is put.
        slot = name in other._buffers and other._buffers[name] is None
        if not slot and _shape(one._buffers, name) != _shape(other._buffers, name):
            return f"a buffer {name}"
    return None


def _shape(tensors: Mapping[str, Tensor | None], name: str) -> Any:
    tensor = tensors.get(name, name)  # a name where there is none
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor


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
