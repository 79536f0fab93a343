"""What a trainer was made with, as JSON; see :mod:`.arguments`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from daskdl.data.models import trainable
from daskdl.data.normalising.normalisation import Normalisation
from daskdl.data.options import Both
from daskdl.data.rehearsal import MISFITS
from daskdl.errors import OptionError, SaveError
from daskdl.fitted.arguments import MADE, plain_with
from daskdl.fitted.fitted import TrainerState, new_optimizer
from daskdl.saving import layers
from daskdl.saving.makers import encode_maker
from daskdl.saving.module_state import ModuleState
from daskdl.saving.plain import Json, Plain
from daskdl.saving.torch_makers import optimizer_maker, scheduler_maker


def encode_arguments(fitted: TrainerState, extra: dict[str, Tensor]) -> dict[str, Json]:
    """Write all arguments of a trainer.

    Args:
        fitted: Not changed.
        extra: Gets the tensors among them.
    """
    content = {}
    for name, value in fitted.arguments.items():
        own: dict[str, Tensor] = {}
        try:
            content[name] = _encoded(name, value, fitted, own)
        except OptionError as error:
            content[name] = {"pass": str(error)}
        else:
            extra.update(own)
    return content


def _encoded(
    name: str, value: Any, fitted: TrainerState, own: dict[str, Tensor]
) -> Json:
    plain = plain_with(own)
    if name not in MADE or value is None:
        return _checked(plain, _simple(value), name)
    if name == "transform":
        return _encoded_transform(value, plain)
    if name == "loss" and isinstance(value, nn.Module):
        return _encoded_module(value, plain)
    ways: Mapping[str, Callable[[], Json]] = {
        "model": lambda: {"layers": layers.describe(fitted.model, name)},
        "optimizer": lambda: _maker(name, _own_optimizer(fitted), plain),
        "scheduler": lambda: _maker(name, _own_scheduler(fitted), plain),
    }
    if name not in ways:
        return _maker(name, value, plain)
    try:
        return ways[name]()
    except OptionError as first:
        try:
            return _maker(name, value, plain)
        except OptionError as second:
            raise OptionError(f"{first}, and {second}") from second


def _simple(value: Any) -> Any:
    if isinstance(value, torch.device):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _checked(plain: Plain, value: Any, name: str) -> Json:
    content = plain.encode(value, name)
    try:
        same = plain.decode(content) == value
    except SaveError as error:
        raise OptionError(f"{name} is not read as it was written: {error}") from error
    if not same:
        raise OptionError(f"{value!r:.200} is not equal to what is read of it")
    return {"value": content}


def _maker(name: str, value: Any, plain: Plain) -> Json:
    return encode_maker(value, MADE[name], plain, name)


def _encoded_transform(value: Any, plain: Plain) -> Json:
    if isinstance(value, Normalisation):
        return {"normaliser": value.to_dict()}
    if isinstance(value, Both):
        return {
            "both": [_encoded_transform(t, plain) for t in (value.first, value.then)]
        }
    return _maker("transform", value, plain)


def _encoded_module(module: nn.Module, plain: Plain) -> Json:
    """A loss of torch: layers, and the tensors it has, class weights for one."""
    plan, state = layers.describe(module, "loss"), ModuleState.of(module)
    tensors = plain.encode({**state.tensors, **state.hidden}, "loss")
    return {"layers": plan, "tensors": tensors, "state": state.to_json()}


def _own_optimizer(fitted: TrainerState) -> Any:
    parameters = trainable(fitted.model)
    return optimizer_maker(new_optimizer(fitted.arguments, fitted.model), parameters)


def _own_scheduler(fitted: TrainerState) -> Any:
    try:
        made = fitted.arguments["scheduler"](
            new_optimizer(fitted.arguments, fitted.model)
        )
    except MISFITS as error:
        raise OptionError(f"scheduler failed on a new optimizer: {error}") from error
    return scheduler_maker(made, lambda: new_optimizer(fitted.arguments, fitted.model))
