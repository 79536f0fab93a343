"""A Keras model as what daskdl trains: a module of torch.

Keras registers everything it keeps as parameters of torch, says by an argument whether
it trains, computes on a device of its own choice, and pickles as a file. Here trainable
weights are parameters, what training merely updates are buffers, the mode is that of
the module, and the device that of its parameters.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from daskdl.errors import ModelError
from daskdl.keras.building import built, check_built, described
from daskdl.keras.library import library
from daskdl.keras.nodes import JSON
from daskdl.keras.writing import save
from daskdl.objective import Penalised

SEEDS = 2**31  # of a generator of Keras are below


def as_module(model: Any) -> Any:
    """Return a Keras model as a module of torch; anything else as it is.

    Raises:
        ModelError: If it is a Keras model that cannot be trained.
        OptionError: If Keras has another backend than PyTorch.
    """
    kind = getattr(sys.modules.get("keras"), "Model", None)
    if not isinstance(kind, type) or not isinstance(model, kind):
        return model
    return KerasModule(model)


class KerasModule(nn.Module, Penalised):
    """A Keras model as a module of torch.

    What it does not have itself is looked up in the Keras model: `predict`,
    `summary`, `layers`, `get_weights`. Both have the same weights, in the same memory.

    In training mode dropout drops, and batch normalisation looks at the batch; in
    evaluation mode they do not. Whatever is random in Keras' layers follows torch's
    generator, seeds that the layers were given notwithstanding: replicas differ.

    Args:
        model: Sequential or functional, of Keras' own layers, built.

    Attributes:
        keras: The model itself.

    Raises:
        ModelError: If it cannot be trained; the message names the layer.
        OptionError: If Keras has another backend than PyTorch.
    """

    def __init__(self, model: Any) -> None:
        library()
        super().__init__()
        check_built(model)
        described(model)  # which names what cannot travel, or cannot be trained
        # Not as a submodule: its parameters would be there a second time.
        self.__dict__["_keras"] = model
        self.__dict__["_variables"] = _variables(model)
        self.__dict__["_seeds"] = _seeds(model)
        for name, (variable, trained) in self._variables.items():
            if trained:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.data)

    @property
    def keras(self) -> Any:
        """See the class."""
        return self._keras

    @override
    def forward(self, x: Any) -> Any:
        """Apply the model.

        Args:
            x: A tensor, or a tuple or dict of tensors if it has several inputs.

        Returns:
            A tensor; of several outputs a tuple or dict.
        """
        if self.training:
            self._draw_seeds_()
        with library().device(self._device()):
            return _tree(self._keras(x, training=self.training))

    @override
    def penalty(self) -> Tensor | None:
        """Return what its regularisers add to the loss after a forward pass, or None.

        The trainer adds it to the loss of each step; a `step` of your own has to.
        """
        with library().device(self._device()):
            losses = self._keras.losses
            return sum(losses[1:], losses[0]) if losses else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as Keras does, in a file that Keras itself can load.

        Args:
            path: Of a local file, ending in ``.keras``; one that is there is replaced.

        Raises:
            OptionError: If the path ends otherwise.
            OSError: If it cannot be written.
        """
        save(self._keras, path)

    def _device(self) -> str:
        variables = (variable for variable, _ in self._variables.values())
        first = next(variables, None)
        return "cpu" if first is None else str(first.value.device)

    def _draw_seeds_(self) -> None:
        if self._seeds:
            drawn = torch.randint(SEEDS, (len(self._seeds), 2))
            drawn[:, 1] = 0  # Keras counts its draws there
            with torch.no_grad():
                for state, seed in zip(self._seeds, drawn, strict=True):
                    state.value.copy_(seed)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = dict((*self.named_parameters(), *self.named_buffers()))
        for name, (variable, _) in self._variables.items():
            variable.value.data = tensors[name].data
        self._finalize_()
        return self

    @override
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._finalize_()

    def _finalize_(self) -> None:
        """Have `Normalization` take its mean from its weights, which have changed."""
        kind = library().layers.Normalization
        for layer in self._keras._flatten_layers():
            if isinstance(layer, kind):
                layer.finalize_state()

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._keras, name)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        weights = [variable.value.detach() for variable, _ in self._variables.values()]
        return _rebuilt, (described(self._keras), weights, self.training)

    @override
    def extra_repr(self) -> str:
        return f"{type(self._keras).__name__} {self._keras.name!r}"


Variables = dict[str, tuple[Any, bool]]  # a variable of Keras; whether it is trained


def _variables(model: Any) -> Variables:
    """The weights by name; those that are in two places once.

    Named after layers, as in ``"dense/kernel"``: paths of Keras begin with the model.
    """
    found: Variables = {}
    for name, variable, trained in _weights_in(model, ""):
        if all(variable is not other for other, _ in found.values()):
            while name in found:
                name += "_"
            found[name] = variable, trained
    return found


def _weights_in(layer: Any, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    for variable in layer._trainable_variables:
        yield prefix + variable.name, variable, True
    for variable in layer._non_trainable_variables:
        yield prefix + variable.name, variable, False
    for inner in layer._layers:
        yield from _weights_in(inner, f"{prefix}{inner.name}/")


def _seeds(model: Any) -> list[Any]:
    """The states of all generators of Keras' layers."""
    layers = model._flatten_layers()
    return [seed.state for layer in layers for seed in layer._seed_generators]


def _rebuilt(config: JSON, weights: Sequence[Tensor], training: bool) -> KerasModule:
    """What `pickle` calls in another process."""
    module = KerasModule(built(config, seeded=False)).train(training)
    variables = [variable for variable, _ in module._variables.values()]
    if len(variables) != len(weights):
        raise ModelError(
            f"the model has {len(weights)} weights, and {len(variables)} when Keras "
            "makes it anew from its description: is a layer shared by two wrappers?"
        )
    with torch.no_grad():
        for variable, weight in zip(variables, weights, strict=True):
            variable.value.copy_(weight)
    return module.to(weights[0].device) if weights else module


def _tree(outputs: Any) -> Any:
    """Outputs as daskdl has them: Keras returns lists."""
    if isinstance(outputs, list | tuple):
        return tuple(_tree(output) for output in outputs)
    if isinstance(outputs, dict):
        return {name: _tree(output) for name, output in outputs.items()}
    return outputs
