"""The state of a module: everything that its code does not make anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from daskdl.errors import OptionError, SaveError
from daskdl.saving.plain import Json
from daskdl.saving.references import FAILURES


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
