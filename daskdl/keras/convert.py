"""The graph of a functional model as Keras 2 writes it, rewritten as Keras 3 does.

A layer has a list of *nodes*, one for each time it is called. Keras 2 writes a node as
its first argument, in which each tensor is ``[layer, node, tensor, other arguments]``;
Keras 3 writes ``{"args": ..., "kwargs": ...}``. Nodes of a nested model count from 1 in
Keras 2, since the first one is its own.

Models as Keras 2 writes them, rewritten as Keras 3 writes them: JSON in, JSON out.

What both write alike passes through, so that files in between, of Keras 2.13 for one,
need no case of their own. Whether a class is known is not looked at here.
"""

from collections.abc import Mapping, Set
from typing import Any

JSON = Any  # what `json.loads` returns

_CONSTANT = "_CONSTANT_VALUE"  # Keras 2 writes it where else the name of a layer is


def modern_graph(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Rewrite the nodes of a functional model; those of Keras 3 stay as they are.

    Args:
        config: Of the model, whose layers have been rewritten; not changed.

    Raises:
        LookupError: If something is missing.
        TypeError: If something is of another kind than Keras writes.
        AttributeError: Likewise.
    """
    layers = config["layers"]
    if not any(isinstance(node, list) for layer in layers for node in _nodes(layer)):
        return dict(config)
    names = {layer["name"] for layer in layers}
    nested = {layer["name"]: layer["class_name"] for layer in layers if _nests(layer)}
    made = []
    for layer in layers:
        nodes = [_node(node, names, nested.keys()) for node in _nodes(layer)]
        made.append({**layer, "inbound_nodes": nodes})
    # Keras 3 takes off the one of a nested functional model by itself here.
    counted = {name for name, kind in nested.items() if kind == "Sequential"}
    outputs = _outputs(config["output_layers"], counted)
    return {**config, "layers": made, "output_layers": outputs}


def _nodes(layer: Mapping[str, JSON]) -> JSON:
    return layer["inbound_nodes"]


def _nests(layer: Mapping[str, JSON]) -> bool:
    """Whether it is a model whose first node is its own."""
    return layer["class_name"] in ("Functional", "Sequential")


def _node(node: JSON, names: Set[str], nested: Set[str]) -> dict[str, JSON]:
    kwargs: dict[str, JSON] = {}
    first = _first_argument(node, nested, kwargs)
    if isinstance(first, list) and len(first) == 1:
        (first,) = first
    others = {key: _other(value, names, nested) for key, value in kwargs.items()}
    return {"args": [first], "kwargs": others}


def _first_argument(part: JSON, nested: Set[str], kwargs: dict[str, JSON]) -> JSON:
    """Rewrite tensors in any structure; other arguments with them are put aside."""
    if isinstance(part, dict):
        return {k: _first_argument(v, nested, kwargs) for k, v in part.items()}
    if not _is_reference(part):
        return [_first_argument(inner, nested, kwargs) for inner in part]
    if len(part) > 3:
        kwargs.update(part[3].items())
    return part[2] if part[0] == _CONSTANT else _tensor(part, nested)


def _other(part: JSON, names: Set[str], nested: Set[str]) -> JSON:
    """Rewrite what may be a tensor, or anything else."""
    if isinstance(part, dict):
        return {key: _other(value, names, nested) for key, value in part.items()}
    if _is_reference(part) and part[0] in names:
        return _tensor(part, nested)
    return [_other(p, names, nested) for p in part] if isinstance(part, list) else part


def _is_reference(part: JSON) -> bool:
    """Whether it is ``[layer, node, tensor]``, with or without other arguments."""
    return (
        isinstance(part, list)
        and len(part) in (3, 4)
        and isinstance(part[0], str)
        and isinstance(part[1], int)
    )


def _tensor(reference: list[JSON], nested: Set[str]) -> dict[str, JSON]:
    layer, node, tensor = reference[:3]
    history = [layer, max(node - 1, 0) if layer in nested else node, tensor]
    # Keras takes the tensor that the layer made; shape and dtype are not looked at.
    config = {"shape": [], "dtype": "float32", "keras_history": history}
    return {"class_name": "__keras_tensor__", "config": config}


def _outputs(part: JSON, counted: Set[str]) -> JSON:
    if isinstance(part, dict):
        return {key: _outputs(inner, counted) for key, inner in part.items()}
    if _is_reference(part):
        layer, node, tensor = part[:3]
        return [layer, max(node - 1, 0) if layer in counted else node, tensor]
    return [_outputs(inner, counted) for inner in part]


MODELS = ("Functional", "Model", "Sequential")

_CLASSES = {"Model": "Functional", "Policy": "DTypePolicy"}
_KEYS = {("LeakyReLU", "alpha"): "negative_slope"}

_DEPTHWISE = ("DepthwiseConv1D", "DepthwiseConv2D")
_SEPARABLE = ("SeparableConv1D", "SeparableConv2D")
_TRANSPOSED = ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
_SPATIAL = ("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")

# Keys that Keras 3 does not take, and the values at which they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "time_major": (False,),
    "groups": (1,),
    "ragged": (False, None),
    "noise_shape": (None,),
    "softmax_robust_masking": (False,),
}
_ONLY_OF = {
    "groups": (*_DEPTHWISE, *_SEPARABLE, *_TRANSPOSED),
    "ragged": ("InputLayer",),
    "noise_shape": _SPATIAL,
}
# How something is computed, and shapes that Keras 3 finds out by itself.
_DROPPED = ("batch_input_shape", "implementation", "input_length", "loss_scale")
# The same of single classes, and what these inherit and do not look at.
_DROPPED_OF: Mapping[str, tuple[str, ...]] = {
    "MultiHeadAttention": ("query_shape", "key_shape", "value_shape"),
    **dict.fromkeys(
        _SEPARABLE, ("kernel_initializer", "kernel_regularizer", "kernel_constraint")
    ),
    **dict.fromkeys((*_SPATIAL, "Discretization"), ("trainable",)),
}


def modern(value: JSON) -> JSON:
    """Rewrite a model, and whatever is in it.

    Args:
        value: Not changed.

    Raises:
        LookupError: If something is missing.
        TypeError: If something is of another kind than Keras writes.
        AttributeError: Likewise.

    Example:
        >>> modern({"class_name": "LeakyReLU", "config": {"alpha": 0.5}})
        {'class_name': 'LeakyReLU', 'config': {'negative_slope': 0.5}}
    """
    if isinstance(value, list):
        return [modern(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind, config = value.get("class_name"), value.get("config")
    if kind in MODELS and config is not None:
        config = _sequential(config) if kind == "Sequential" else _functional(config)
    elif isinstance(kind, str) and isinstance(config, dict):
        config = _settings(kind, config)
    else:
        return {key: modern(part) for key, part in value.items()}
    return {**value, "class_name": _CLASSES.get(kind, kind), "config": config}


def _settings(kind: str, config: dict[str, JSON]) -> dict[str, JSON]:
    """The arguments of one object."""
    made = {}
    for key, value in config.items():
        if not _is_dropped(kind, key, value):
            made[_KEYS.get((kind, key), key)] = modern(value)
    shape = config.get("batch_input_shape")
    if kind == "InputLayer" and shape is not None:
        made["batch_shape"] = shape
    axis = config.get("axis")
    if kind == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
        made["axis"] = axis[0]
    for key, value in made.items():
        if key.endswith("_initializer") and isinstance(value, dict):
            inner = value.get("config")
            if isinstance(inner, dict):
                inner.pop("dtype", None)  # of TensorFlow 2.0
    return made


def _is_dropped(kind: str, key: str, value: JSON) -> bool:
    if key in _DROPPED or key in _DROPPED_OF.get(kind, ()):
        return True
    of = _ONLY_OF.get(key)
    return value in _NEUTRAL.get(key, ()) and (of is None or kind in of)


def _sequential(config: JSON) -> dict[str, JSON]:
    if isinstance(config, list):  # as Keras wrote it before 2.2.3
        config = {"name": "sequential", "layers": config}
    layers = [modern(layer) for layer in config["layers"]]
    if layers and layers[0].get("class_name") != "InputLayer":
        first = config["layers"][0]["config"]
        shape = first.get("batch_input_shape") if isinstance(first, dict) else None
        if shape is not None:
            layers.insert(0, _input_layer(first, shape))
    return {**config, "layers": layers}


def _input_layer(first: dict[str, JSON], shape: JSON) -> dict[str, JSON]:
    dtype = first.get("dtype")
    config = {
        "name": f"{first.get('name', 'layer')}_input",
        "batch_shape": shape,
        "dtype": dtype if isinstance(dtype, str) else "float32",
    }
    return {"class_name": "InputLayer", "config": config}


def _functional(config: dict[str, JSON]) -> dict[str, JSON]:
    layers = [modern(layer) for layer in config["layers"]]
    return modern_graph({**config, "layers": layers})
