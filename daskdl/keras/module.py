"""The library Keras, imported when it is first needed, on its PyTorch backend.

Keras settles its backend once for each process, when it is imported. Workers unpickle
models, so they come through here too, each with an environment of its own.

Which classes a model may be made of: those of Keras itself that run no foreign code.

Everything is looked up by name in Keras' own tables, and what a file says about where
its classes are only serves to refuse others. So nothing of a file is executed.

Keras models made of what describes them, and described again.

Keras models as files of Keras.

Losses for models that end in probabilities, as most models of Keras do.

A Keras model as what daskdl trains: a module of torch.

Keras registers everything it keeps as parameters of torch, says by an argument whether
it trains, computes on a device of its own choice, and pickles as a file. Here trainable
weights are parameters, what training merely updates are buffers, the mode is that of
the module, and the device that of its parameters.
"""

import contextlib
import functools
import json
import os
import random
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from daskdl.data.checks import USER_ERRORS
from daskdl.errors import ModelError, OptionError
from daskdl.keras.convert import JSON
from daskdl.objective import Penalised

BACKEND = "torch"
VARIABLE = "KERAS_BACKEND"

# Building a model goes through state of the whole process: Python's generator is one.
_building = threading.RLock()


@functools.cache
def library() -> Any:
    """Return the module `keras`.

    Raises:
        OptionError: If it is not installed, older than 3, or has another backend
            than PyTorch in this process.
    """
    with _on_torch():
        try:
            import keras
        except ImportError as error:
            raise OptionError(
                f"Keras models need the library Keras 3, which cannot be imported "
                f"here: {error}; install it with pip install daskdl[keras], also on "
                "the workers"
            ) from error
    if int(keras.__version__.split(".")[0]) < 3:
        raise OptionError(
            f"Keras models need Keras 3, got {keras.__version__}; install it with "
            "pip install daskdl[keras], also on the workers"
        )
    backend = keras.backend.backend()
    if backend != BACKEND:
        raise OptionError(
            f"Keras models are trained on Keras' backend {BACKEND!r}, and keras has "
            f"been imported with {backend!r} in this process; set "
            f"{VARIABLE}={BACKEND} before it is imported, also on the workers"
        )
    return keras


@contextlib.contextmanager
def _on_torch() -> Iterator[None]:
    """Have Keras choose PyTorch; an environment that says something else is wrong."""
    chosen = os.environ.get(VARIABLE)
    if chosen or "keras" in sys.modules:
        if "keras" not in sys.modules and chosen != BACKEND:
            raise OptionError(
                f"Keras models are trained on Keras' backend {BACKEND!r}, and "
                f"{VARIABLE} is {chosen!r} in this process; set it to {BACKEND}, or "
                "unset it, also on the workers"
            )
        yield
        return
    os.environ[VARIABLE] = BACKEND  # else a file in the user's home decides
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


@contextlib.contextmanager
def building(*, seeded: bool) -> Iterator[Any]:
    """Build a model meanwhile: on the CPU, and Python's generator is left as it was.

    Initialisers without a seed draw one from Python's generator.

    Args:
        seeded: Let torch's generator decide what they draw.

    Yields:
        The library.
    """
    keras = library()
    with _building:
        former = random.getstate()
        if seeded:
            random.seed(int(torch.randint(2**31, ())))
        try:
            with keras.device("cpu"):
                yield keras
        finally:
            random.setstate(former)


# Their settings are code, pickles, or the path of a saved program.
_CODE = ("Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer")
_CODE_MARKS = ("__lambda__", "__typespec__")

_PLAIN = frozenset(
    {"__keras_tensor__", "__numpy__", "__tensor__", "__bytes__", "__slice__"}
    | {"__ellipsis__"}
)
_MODELS = {"Functional": "keras.src.models.functional", "Sequential": "keras"}
_OPERATIONS = re.compile(r"keras\.src\.ops\.[a-z_]+")  # as `a + b` of two outputs
_KERAS = re.compile(r"(tf_|tensorflow\.)?keras(\..*)?|builtins")
_POLICIES = ("DTypePolicy", "FloatDTypePolicy")

# They keep words, in files of their own.
_VOCABULARIES = ("TextVectorization", "StringLookup", "IntegerLookup")

# Parts of a layer, which have no place of their own to name.
_SETTINGS = ("initializer", "regularizer", "dtype")
_NAMED = (*_SETTINGS, "activation")

# What the optimizers of torch would leave out without a word, or the replicas mix up.
_UNTRAINABLE = {
    "_constraint": "a constraint, which no optimizer of torch keeps",
    "stateful": "stateful=True, and batches of all replicas have no common order",
}


def vetted(config: JSON) -> JSON:
    """Refuse what is not of Keras, or cannot be trained; by name.

    Args:
        config: A model, as Keras 3 writes it; not changed.

    Returns:
        The same with the places of Keras' own classes, without what a model was
        compiled with and built for.

    Raises:
        ModelError: Naming the layer and the class.
    """
    return _vetted(config, "", "the model")


def _vetted(value: JSON, key: str, where: str) -> JSON:
    if isinstance(value, list):
        return [_vetted(part, key, where) for part in value]
    if not isinstance(value, dict):
        _check_setting(key, value, where)
        return value
    if "class_name" not in value or "config" not in value:
        return {name: _vetted(part, name, where) for name, part in value.items()}
    where = _place(value, key, where)
    if not isinstance(value["class_name"], str):
        _refuse(where, value["class_name"])
    if value["class_name"] in _PLAIN:
        return value
    _check_setting(key, value, where)
    return _object(value, key, where)


def _check_setting(key: str, value: JSON, where: str) -> None:
    for ending, reason in _UNTRAINABLE.items():
        if key.endswith(ending) and value not in (None, False):
            raise ModelError(f"{where} has {reason}; set {key} to null")
    if key.endswith(_NAMED) and isinstance(value, str) and value in _registered():
        _refuse(where, value)


def _registered() -> Mapping[str, Any]:
    """What the program has told Keras to make when a file has its name."""
    registered: Mapping[str, Any] = library().saving.get_custom_objects()
    return registered


def _object(value: dict[str, JSON], key: str, where: str) -> JSON:
    kind = value["class_name"]
    if kind == "function":
        return _activation(value, where)
    made = {
        "module": _home(value, key, where),
        "class_name": kind,
        "config": _vetted(value["config"], "", where),
        "registered_name": None,
    }
    for name in ("name", "inbound_nodes"):
        if name in value:
            made[name] = _vetted(value[name], name, where)
    return made


def _place(value: Mapping[str, JSON], key: str, where: str) -> str:
    """How to speak of an object: of a layer by its name, else by where it is."""
    config = value["config"]
    name = config.get("name") if isinstance(config, dict) else None
    return where if name is None or key.endswith(_SETTINGS) else f"layer {name!r}"


def _activation(value: Mapping[str, JSON], where: str) -> str:
    name = value["config"]
    if not isinstance(name, str) or not hasattr(library().activations, name):
        raise ModelError(
            f"{where} has the function {name!r}, which is no activation of Keras"
        )
    return name


def _home(value: Mapping[str, JSON], key: str, where: str) -> str:
    """The module in which Keras 3 looks for a class."""
    kind, module = value["class_name"], value.get("module", "keras")
    if kind in _CODE or kind in _CODE_MARKS:
        raise ModelError(
            f"{where} is a {kind}, which is made of code; nothing of a file is "
            "executed: use layers of Keras in its place"
        )
    if kind in _VOCABULARIES:
        raise ModelError(f"{where} is a {kind}; turn words into numbers beforehand")
    registered = value.get("registered_name") or kind
    if not isinstance(module, str) or not _KERAS.fullmatch(module):
        _refuse(where, f"{module}.{kind}" if module else kind)
    if registered not in (kind, f"keras>{kind}"):
        _refuse(where, registered)
    if kind in _MODELS:
        return _MODELS[kind]
    if _OPERATIONS.fullmatch(module):
        return _operation(kind, module, where)
    return _namespace(kind, key, where)


def _operation(kind: str, module: str, where: str) -> str:
    # Keras has imported all of its own; its tests lie beside them.
    found = getattr(sys.modules.get(module), kind, None)
    if not isinstance(found, type) or not issubclass(found, library().Operation):
        _refuse(where, f"{module}.{kind}")
    return module


def _namespace(kind: str, key: str, where: str) -> str:
    keras = library()
    space, base = _expected(keras, key)
    found = getattr(getattr(keras, space), kind, None)
    if not isinstance(found, type) or not issubclass(found, base):
        _refuse(where, kind)
    if space == "dtype_policies" and kind not in _POLICIES:
        raise ModelError(f"{where} is quantised ({kind}); only floating ones train")
    return "keras" if space == "dtype_policies" else f"keras.{space}"


def _expected(keras: Any, key: str) -> tuple[str, type]:
    """Where the class of a setting is, and what it derives from."""
    if key.endswith("initializer"):
        return "initializers", keras.Initializer
    if key.endswith("regularizer"):
        return "regularizers", keras.Regularizer
    if key.endswith("dtype"):
        return "dtype_policies", keras.DTypePolicy
    return "layers", keras.layers.Layer


def _refuse(where: str, what: object) -> NoReturn:
    raise ModelError(
        f"{where} is or has a {what}, which is no class of Keras 3; custom classes do "
        "not travel: build the model of layers that Keras has"
    )


# What Keras raises when a description is wrong somewhere.
WRONG = (*USER_ERRORS, ImportError)


def built(config: JSON, *, seeded: bool) -> Any:
    """Make a Keras model, on the CPU.

    Args:
        config: As Keras 3 writes it, vetted; not changed.
        seeded: Torch's generator decides its weights; else they are anything.

    Raises:
        ModelError: If Keras cannot make it, or its input has no shape.
    """
    with building(seeded=seeded) as keras:
        # Keras takes apart what it is given.
        own = json.loads(json.dumps(config))
        try:
            model = keras.saving.deserialize_keras_object(own, safe_mode=True)
        except WRONG as error:
            raise ModelError(
                f"Keras {keras.__version__} cannot make the model: {gist(error)}"
            ) from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a model, got the description of a {type(model)}")
    check_built(model)
    return model


def described(model: Any) -> JSON:
    """Return what a Keras model is made of, vetted.

    Raises:
        ModelError: If it cannot be described or has what cannot be trained.
    """
    keras = library()
    try:
        config = keras.saving.serialize_keras_object(model)
    except WRONG as error:
        raise ModelError(
            f"Keras cannot describe the model {model.name!r}: {gist(error)}"
        ) from error
    return vetted(config)


def check_built(model: Any) -> None:
    """Refuse a model without weights, since the shape of its input is not known.

    Raises:
        ModelError: If it is one.
    """
    unbuilt = [layer.name for layer in (model, *model.layers) if not layer.built]
    if unbuilt:
        raise ModelError(
            f"the shape of the input of {unbuilt[0]!r} is not known; begin the model "
            "with a keras.Input (in JSON: an InputLayer, or batch_input_shape in the "
            "first layer)"
        )


def gist(error: BaseException) -> str:
    """The line of an error of Keras that says most: it shows all settings first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'without a message'}"


ENDING = ".keras"


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a Keras model; a file that is there is replaced when all is written.

    Args:
        model: Of Keras.
        path: Of a local file, ending in ``.keras``.

    Raises:
        OptionError: If it ends otherwise.
        OSError: If it cannot be written.
    """
    target = Path(path)
    if target.suffix != ENDING:
        raise OptionError(f"path must end in {ENDING!r}, got {str(path)!r}")
    partial = target.with_name(f".{target.stem}-{secrets.token_hex(4)}{ENDING}")
    try:
        model.save(partial)
        partial.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


# As in Keras: below it the logarithm of float32 says more about rounding than of data.
SMALLEST = 1e-7


class CrossEntropyOfProbabilities(nn.NLLLoss):
    """The cross-entropy of class indices, for outputs that went through a softmax.

    Torch's `CrossEntropyLoss` takes the softmax itself; after that of the model it
    would be the second one, with which training is slow and ends early. The arguments
    are those of `torch.nn.NLLLoss`.

    Example:
        >>> import torch
        >>> scores, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
        >>> round(CrossEntropyOfProbabilities()(scores.softmax(1), labels).item(), 4)
        0.1698
        >>> round(nn.CrossEntropyLoss()(scores, labels).item(), 4)
        0.1698
    """

    scale = "probabilities"  # not their logarithms, as metrics would have it

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.clamp(min=SMALLEST).log(), target)


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
