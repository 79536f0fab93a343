"""A Keras model as a torch module, built from Keras' own layers only.

Keras is imported on first use, with its PyTorch backend. Descriptions written by Keras
2 are converted to Keras 3. Classes are looked up in Keras' own namespaces, so loading a
description imports and executes nothing.
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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import ModelError, OptionError
from daskdl.objective import Penalized

JSON = Any  # what `json.loads` returns

MODELS = ("Functional", "Model", "Sequential")
_CLASSES = {"Model": "Functional", "Policy": "DTypePolicy"}
_DEPTHWISE = ("DepthwiseConv1D", "DepthwiseConv2D")
_SEPARABLE = ("SeparableConv1D", "SeparableConv2D")
_TRANSPOSED = ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
_SPATIAL = ("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")
_ALL = None

# By key that Keras 3 does not accept: values without effect, and the classes.
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...] | None]] = {
    "time_major": ((False,), _ALL),
    "softmax_robust_masking": ((False,), _ALL),
    "groups": ((1,), (*_DEPTHWISE, *_SEPARABLE, *_TRANSPOSED)),
    "ragged": ((False, None), ("InputLayer",)),
    "noise_shape": ((None,), _SPATIAL),
}
# Implementation choices, and shapes that Keras 3 infers.
_DROPPED = ("batch_input_shape", "implementation", "input_length", "loss_scale")
# The same by class, and settings that the class inherits and ignores.
_DROPPED_OF: Mapping[str, tuple[str, ...]] = {
    "MultiHeadAttention": ("query_shape", "key_shape", "value_shape"),
    **dict.fromkeys(
        _SEPARABLE, ("kernel_initializer", "kernel_regularizer", "kernel_constraint")
    ),
    **dict.fromkeys((*_SPATIAL, "Discretization"), ("trainable",)),
}
_CONSTANT = "_CONSTANT_VALUE"  # written by Keras 2 instead of a layer's name


def to_keras3(value: JSON) -> JSON:
    """Convert the description of a model from Keras 2 to Keras 3.

    Example:
        >>> to_keras3({"class_name": "LeakyReLU", "config": {"alpha": 0.5}})
        {'class_name': 'LeakyReLU', 'config': {'negative_slope': 0.5}}
    """
    if isinstance(value, list):
        return [to_keras3(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind, config = value.get("class_name"), value.get("config")
    if kind == "Sequential" and config is not None:
        config = _sequential(config)
    elif kind in MODELS and config is not None:
        config = _functional(config)
    elif isinstance(kind, str) and isinstance(config, dict):
        config = _settings(kind, config)
    else:
        return {key: to_keras3(part) for key, part in value.items()}
    return {**value, "class_name": _CLASSES.get(kind, kind), "config": config}


def _settings(kind: str, config: dict[str, JSON]) -> dict[str, JSON]:
    settings = {}
    for key, value in config.items():
        neutral, kinds = _NEUTRAL.get(key, ((), _ALL))
        unused = value in neutral and (kinds is _ALL or kind in kinds)
        if unused or key in _DROPPED or key in _DROPPED_OF.get(kind, ()):
            continue
        settings[key] = to_keras3(value)
        if key.endswith("_initializer") and isinstance(value, dict):
            inner = settings[key].get("config")
            if isinstance(inner, dict):
                inner.pop("dtype", None)  # written by some releases of Keras 2
    if kind == "LeakyReLU" and "alpha" in settings:
        settings["negative_slope"] = settings.pop("alpha")
    if kind == "InputLayer" and config.get("batch_input_shape") is not None:
        settings["batch_shape"] = config["batch_input_shape"]
    axis = config.get("axis")
    if kind == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
        settings["axis"] = axis[0]
    return settings


def _sequential(config: JSON) -> dict[str, JSON]:
    if isinstance(config, list):  # written by early releases of Keras 2
        config = {"name": "sequential", "layers": config}
    layers = [to_keras3(layer) for layer in config["layers"]]
    if layers and layers[0].get("class_name") != "InputLayer":
        layer = config["layers"][0]["config"]
        shape = layer.get("batch_input_shape") if isinstance(layer, dict) else None
        if shape is not None:
            dtype = layer.get("dtype")
            settings = {
                "name": f"{layer.get('name', 'layer')}_input",
                "batch_shape": shape,
                "dtype": dtype if isinstance(dtype, str) else "float32",
            }
            layers.insert(0, {"class_name": "InputLayer", "config": settings})
    return {**config, "layers": layers}


def _functional(config: dict[str, JSON]) -> dict[str, JSON]:
    """Convert a graph, in which a layer has one node for each call.

    Keras 2 writes a node as its first argument, in which a tensor is ``[layer, node,
    tensor, other arguments]``. It counts a nested model's own node as the first node.
    """
    layers = [to_keras3(layer) for layer in config["layers"]]
    config = {**config, "layers": layers}
    nodes = [node for layer in layers for node in layer["inbound_nodes"]]
    if not any(isinstance(node, list) for node in nodes):
        return config
    nested = {
        layer["name"]: layer["class_name"] in ("Functional", "Sequential")
        for layer in layers
    }
    for layer in layers:
        layer["inbound_nodes"] = [_node(n, nested) for n in layer["inbound_nodes"]]
    # For nested functional models, Keras 3 itself subtracts the first node here.
    counted = {layer["name"] for layer in layers if layer["class_name"] == "Sequential"}
    outputs = _outputs(config["output_layers"], counted)
    return {**config, "output_layers": outputs}


def _node(node: JSON, nested: Mapping[str, bool]) -> dict[str, JSON]:
    keywords: dict[str, JSON] = {}
    argument = _tensors(node, nested, keywords)
    if isinstance(argument, list) and len(argument) == 1:
        (argument,) = argument
    return {"args": [argument], "kwargs": _tensors(keywords, nested, {})}


def _tensors(part: JSON, nested: Mapping[str, bool], keywords: dict[str, JSON]) -> JSON:
    """Convert the tensors in a structure; collect the keyword arguments of the call."""
    if isinstance(part, dict):
        return {key: _tensors(inner, nested, keywords) for key, inner in part.items()}
    if not isinstance(part, list):
        return part
    if not _is_reference(part) or part[0] not in {*nested, _CONSTANT}:
        return [_tensors(inner, nested, keywords) for inner in part]
    if len(part) > 3:
        keywords.update(part[3].items())
    layer, node, tensor = part[:3]
    if layer == _CONSTANT:
        return tensor
    history = [layer, max(node - 1, 0) if nested[layer] else node, tensor]
    # Keras looks the tensor up and ignores shape and dtype.
    config = {"shape": [], "dtype": "float32", "keras_history": history}
    return {"class_name": "__keras_tensor__", "config": config}


def _outputs(part: JSON, counted: set[str]) -> JSON:
    if isinstance(part, dict):
        return {key: _outputs(inner, counted) for key, inner in part.items()}
    if not _is_reference(part):
        return [_outputs(inner, counted) for inner in part]
    layer, node, tensor = part[:3]
    return [layer, max(node - 1, 0) if layer in counted else node, tensor]


def _is_reference(part: JSON) -> bool:
    return (
        isinstance(part, list)
        and len(part) in (3, 4)
        and isinstance(part[0], str)
        and isinstance(part[1], int)
    )


BACKEND = "torch"
BACKEND_VARIABLE = "KERAS_BACKEND"
SUFFIX = ".keras"
SEEDS = 2**31  # seeds of Keras' generators are less than this
EPSILON = 1e-7  # as in Keras; logarithms of less are mostly rounding errors in float32
# Raised by Keras for an invalid description.
KERAS_ERRORS = (*USER_ERRORS, ImportError)
# Building a model changes global state, such as Python's random generator.
_building = threading.RLock()


@functools.cache
def library() -> Any:
    """Import Keras 3 on its PyTorch backend, and return the module."""
    chosen, is_new = os.environ.get(BACKEND_VARIABLE), "keras" not in sys.modules
    if is_new and chosen and chosen != BACKEND:
        raise OptionError(
            f"Keras models need Keras' backend {BACKEND!r}, but {BACKEND_VARIABLE} is "
            f"{chosen!r} in this process; set it to {BACKEND}, or unset it, also on "
            "the workers"
        )
    if is_new and not chosen:
        # Otherwise, a file in the user's home directory determines the backend.
        os.environ[BACKEND_VARIABLE] = BACKEND
    try:
        import keras
    except ImportError as error:
        raise OptionError(
            "Keras models need the package Keras 3, which cannot be imported here: "
            f"{error}; install it with pip install 'daskdl[keras]', also on the workers"
        ) from error
    finally:
        if is_new and not chosen:
            os.environ.pop(BACKEND_VARIABLE, None)
    if int(keras.__version__.split(".")[0]) < 3:
        raise OptionError(
            f"Keras models need Keras 3, got {keras.__version__}; install it with "
            "pip install 'daskdl[keras]', also on the workers"
        )
    backend = keras.backend.backend()
    if backend != BACKEND:
        raise OptionError(
            f"Keras models need Keras' backend {BACKEND!r}, but Keras has been "
            f"imported with {backend!r} in this process; set "
            f"{BACKEND_VARIABLE}={BACKEND} before the import, also on the workers"
        )
    return keras


# ---- classes that a model may contain


# Layers whose settings are code, pickles, or the path of a saved program.
_CODE = (
    *("Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"),
    *("__lambda__", "__typespec__"),
)
# Layers that load a vocabulary from a file.
_VOCABULARIES = ("TextVectorization", "StringLookup", "IntegerLookup")
_PLAIN = frozenset(
    {"__keras_tensor__", "__numpy__", "__tensor__", "__bytes__", "__slice__"}
    | {"__ellipsis__"}
)
_MODELS = {"Functional": "keras.src.models.functional", "Sequential": "keras"}
_OPERATIONS = re.compile(r"keras\.src\.ops\.[a-z_]+")  # such as `a + b` of outputs
_KERAS = re.compile(r"(tf_|tensorflow\.)?keras(\..*)?|builtins")
_POLICIES = ("DTypePolicy", "FloatDTypePolicy")
# By ending of a setting: the namespace of its classes, and their base class.
_SPACES = {
    "initializer": ("initializers", "Initializer"),
    "regularizer": ("regularizers", "Regularizer"),
    "dtype": ("dtype_policies", "DTypePolicy"),
}
# Settings that torch's optimizers ignore, or that do not work with replicas.
_UNTRAINABLE = {
    "_constraint": "a constraint, which torch's optimizers do not enforce",
    "stateful": "stateful=True, but batches of several replicas have no common order",
}


def vetted(value: JSON, key: str = "", where: str = "the model") -> JSON:
    """Refuse classes that are not Keras' own, and models that cannot be trained."""
    if isinstance(value, list):
        return [vetted(part, key, where) for part in value]
    config = value.get("config") if isinstance(value, dict) else None
    named = isinstance(value, dict) and {"class_name", "config"} <= value.keys()
    if isinstance(value, dict) and not named:
        return {name: vetted(part, name, where) for name, part in value.items()}
    if named:
        kind = value["class_name"]
        setting = key.endswith((*_SPACES,))
        if isinstance(config, dict) and config.get("name") is not None and not setting:
            where = f"layer {config['name']!r}"
        if not isinstance(kind, str):
            _refuse(where, kind)
        if kind in _PLAIN:
            return value
    for ending, reason in _UNTRAINABLE.items():
        if key.endswith(ending) and value not in (None, False):
            raise ModelError(f"{where} has {reason}; set {key} to null")
    if named:
        return _vetted_object(value, key, where)
    setting = isinstance(value, str) and key.endswith((*_SPACES, "activation"))
    if setting and value in library().saving.get_custom_objects():
        _refuse(where, value)
    return value


def _vetted_object(value: dict[str, JSON], key: str, where: str) -> JSON:
    kind, config = value["class_name"], value["config"]
    if kind == "function":
        if not isinstance(config, str) or not hasattr(library().activations, config):
            raise ModelError(
                f"{where} has the function {config!r}, which is not one of Keras' "
                "activations"
            )
        return config
    if kind in _CODE:
        raise ModelError(
            f"{where} is a {kind}, which contains code, and code from files is never "
            "executed: use layers of Keras instead"
        )
    if kind in _VOCABULARIES:
        raise ModelError(f"{where} is a {kind}; convert words to numbers beforehand")
    copied = {
        "module": _module_of(value, key, where),
        "class_name": kind,
        "config": vetted(config, "", where),
        "registered_name": None,
    }
    others = [name for name in ("name", "inbound_nodes") if name in value]
    return copied | {name: vetted(value[name], name, where) for name in others}


def _module_of(value: dict[str, JSON], key: str, where: str) -> str:
    """Return the module in which Keras 3 looks for a class; refuse other classes."""
    kind, module = value["class_name"], value.get("module", "keras")
    registered = value.get("registered_name") or kind
    if not isinstance(module, str) or not _KERAS.fullmatch(module):
        _refuse(where, f"{module}.{kind}" if module else kind)
    if registered not in (kind, f"keras>{kind}"):
        _refuse(where, registered)
    if kind in _MODELS:
        return _MODELS[kind]
    keras = library()
    if _OPERATIONS.fullmatch(module):
        # Keras has imported its own modules, but not the test modules beside them.
        operation = getattr(sys.modules.get(module), kind, None)
        if not _is_subclass(operation, keras.Operation):
            _refuse(where, f"{module}.{kind}")
        return module
    space, base = "layers", keras.layers.Layer
    for ending, (namespace, name) in _SPACES.items():
        if key.endswith(ending):
            space, base = namespace, getattr(keras, name)
    if not _is_subclass(getattr(getattr(keras, space), kind, None), base):
        _refuse(where, kind)
    if space != "dtype_policies":
        return f"keras.{space}"
    if kind not in _POLICIES:
        raise ModelError(
            f"{where} is quantized ({kind}); only floating-point layers can be trained"
        )
    return "keras"


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _refuse(where: str, what: object) -> NoReturn:
    raise ModelError(
        f"{where} is or has a {what}, which is not a class of Keras 3; custom classes "
        "are not supported: build the model from Keras' own layers"
    )


# ---- models from descriptions, and descriptions of models


@contextlib.contextmanager
def building(*, seeded: bool) -> Iterator[Any]:
    """Context manager: build models on the CPU; restore Python's random generator."""
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


def built(config: JSON, *, seeded: bool) -> Any:
    """Create a Keras model on the CPU."""
    with building(seeded=seeded) as keras:
        copied = json.loads(json.dumps(config))  # Keras modifies its argument
        try:
            model = keras.saving.deserialize_keras_object(copied, safe_mode=True)
        except KERAS_ERRORS as error:
            raise ModelError(
                f"Keras {keras.__version__} cannot create the model: {last_line(error)}"
            ) from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a model, got the description of a {type(model)}")
    _check_built(model)
    return model


def described(model: Any) -> JSON:
    """Return the vetted description of a Keras model."""
    try:
        config = library().saving.serialize_keras_object(model)
    except KERAS_ERRORS as error:
        raise ModelError(
            f"Keras cannot describe the model {model.name!r}: {last_line(error)}"
        ) from error
    return vetted(config)


def _check_built(model: Any) -> None:
    unbuilt = [layer.name for layer in (model, *model.layers) if not layer.built]
    if unbuilt:
        raise ModelError(
            f"the input shape of {unbuilt[0]!r} is unknown; start the model with a "
            "keras.Input (in JSON: an InputLayer, or batch_input_shape in the first "
            "layer)"
        )


def last_line(error: BaseException) -> str:
    """Return the last line of an error; Keras writes all settings before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'without a message'}"


# ---- modules that users train


class CrossEntropyOfProbabilities(nn.NLLLoss):
    """The cross-entropy of class indices, for models that end in a softmax.

    Torch's `CrossEntropyLoss` applies a softmax itself; a second softmax slows training
    down and limits accuracy. The arguments are those of `torch.nn.NLLLoss`.

    Example:
        >>> import torch
        >>> scores, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
        >>> round(CrossEntropyOfProbabilities()(scores.softmax(1), labels).item(), 4)
        0.1698
        >>> round(nn.CrossEntropyLoss()(scores, labels).item(), 4)
        0.1698
    """

    scale = "probabilities"  # metrics would assume the log probabilities of NLLLoss

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.clamp(min=EPSILON).log(), target)


def as_module(model: Any) -> Any:
    """Wrap a Keras model as a torch module; return anything else unchanged."""
    kind = getattr(sys.modules.get("keras"), "Model", None)
    return KerasModule(model) if kind and isinstance(model, kind) else model


class KerasModule(nn.Module, Penalized):
    """A Keras model as a torch module.

    Other attributes are those of the Keras model: `predict`, `summary`, `layers`,
    `get_weights`. The module and the model share the memory of the weights: trainable
    weights are parameters, others are buffers.

    Dropout and batch normalization follow the module's training mode. Random layers
    draw from torch's generator and ignore their own seeds, so replicas differ.

    Args:
        model: A built Sequential or functional model of Keras' own layers.

    Attributes:
        keras: The Keras model.

    Raises:
        ModelError: If the model cannot be trained; the message names the layer.
        OptionError: If Keras does not run on PyTorch.
    """

    def __init__(self, model: Any) -> None:
        library()
        super().__init__()
        _check_built(model)
        described(model)  # raises for layers that cannot be copied or trained
        # Not as a submodule, which would register its parameters twice.
        self.__dict__["_keras"] = model
        self.__dict__["_compile_config"] = None
        self.__dict__["_variables"] = _variables(model)
        self.__dict__["_seeds"] = _seeds(model)
        for name, (variable, trained) in self._variables.items():
            if trained:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.data)

    @property
    def keras(self) -> Any:
        """The Keras model."""
        return self._keras

    @property
    def compile_config(self) -> Mapping[str, Any]:
        """The model's compile settings; empty if the model is not compiled.

        They are the defaults of :class:`daskdl.Trainer` for loss, optimizer and
        metrics.
        """
        loaded = self.__dict__["_compile_config"]
        return compile_config(self._keras) if loaded is None else loaded

    @override
    def forward(self, x: Any, /) -> Any:
        """Apply the model.

        Args:
            x: A tensor; a tuple or dict of tensors for several inputs.

        Returns:
            A tensor; a tuple or dict of tensors for several outputs.
        """
        if self.training:
            self._draw_seeds_()
        with library().device(self._device()):
            return _with_tuples(self._keras(x, training=self.training))

    @override
    def penalty(self) -> Tensor | None:
        """Return the regularization penalty of the last forward pass, or None.

        The trainer adds the penalty to the loss; a custom `step` has to add it itself.
        """
        with library().device(self._device()):
            losses = self._keras.losses
            return sum(losses[1:], losses[0]) if losses else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model to a file that Keras can load.

        Args:
            path: Path of a local file, ending in ``.keras``. An existing file is
                replaced atomically.

        Raises:
            OptionError: If the path has a different ending.
            OSError: If the file cannot be written.
        """
        target = Path(path)
        if target.suffix != SUFFIX:
            raise OptionError(f"path must end in {SUFFIX!r}, got {str(path)!r}")
        partial = target.with_name(f".{target.stem}-{secrets.token_hex(4)}{SUFFIX}")
        try:
            self._keras.save(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def _device(self) -> str:
        devices = (str(v.value.device) for v, _ in self._variables.values())
        return next(devices, "cpu")

    def _draw_seeds_(self) -> None:
        if self._seeds:
            drawn = torch.randint(SEEDS, (len(self._seeds), 2))
            drawn[:, 1] = 0  # where Keras counts its draws
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
        """Update the statistics of `Normalization` layers from their new weights."""
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
        config = self.__dict__["_compile_config"]
        return _rebuilt, (described(self._keras), weights, self.training, config)

    @override
    def extra_repr(self) -> str:
        return f"{type(self._keras).__name__} {self._keras.name!r}"


def compile_config(model: Any) -> Mapping[str, Any]:
    """Return the compile settings of a Keras model; empty if it is not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # warnings about functions, which are not called
        config = model.get_compile_config() if model.compiled else {}
    # The loss itself, because Keras omits arguments of some losses.
    return {**config, "loss": model.loss} if config else config


def _variables(model: Any) -> dict[str, tuple[Any, bool]]:
    """Return each variable once, by name, and whether it is trained.

    Names are the paths of the layers, as in ``"dense/kernel"``, without the model's.
    """
    variables: dict[str, tuple[Any, bool]] = {}

    def visit(layer: Any, prefix: str) -> None:
        trained = [(variable, True) for variable in layer._trainable_variables]
        frozen = [(variable, False) for variable in layer._non_trainable_variables]
        for variable, is_trained in (*trained, *frozen):
            if all(variable is not known for known, _ in variables.values()):
                name = prefix + variable.name
                while name in variables:
                    name += "_"
                variables[name] = variable, is_trained
        # Private in Keras 3.11 to 3.15, where only models have a public `layers`.
        for inner in layer._layers:
            visit(inner, f"{prefix}{inner.name}/")

    visit(model, "")
    return variables


def _seeds(model: Any) -> list[Any]:
    # Private in Keras 3.11 to 3.15: nothing public lists generators of nested layers.
    layers = model._flatten_layers()
    return [seed.state for layer in layers for seed in layer._seed_generators]


def _rebuilt(
    config: JSON, weights: Sequence[Tensor], training: bool, compiled: JSON
) -> KerasModule:
    """Recreate a module from its pickle."""
    module = KerasModule(built(config, seeded=False)).train(training)
    module.__dict__["_compile_config"] = compiled
    variables = [variable for variable, _ in module._variables.values()]
    if len(variables) != len(weights):
        raise ModelError(
            f"the model has {len(weights)} weights, but {len(variables)} after Keras "
            "rebuilt it from its description; do two wrappers share a layer?"
        )
    with torch.no_grad():
        for variable, weight in zip(variables, weights, strict=True):
            variable.value.copy_(weight)
    return module.to(weights[0].device) if weights else module


def _with_tuples(outputs: Any) -> Any:
    """Convert Keras' lists of outputs to tuples."""
    if isinstance(outputs, list | tuple):
        return tuple(map(_with_tuples, outputs))
    if isinstance(outputs, dict):
        return {name: _with_tuples(output) for name, output in outputs.items()}
    return outputs
