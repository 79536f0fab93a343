"""Models as Keras 2 writes them, rewritten as Keras 3 writes them: JSON in, JSON out.

What both write alike passes through, so files in between need no case of their own.
Unknown classes are refused later, see `daskdl.keras.module.vetted`.
"""

from collections.abc import Mapping
from typing import Any

JSON = Any  # what `json.loads` returns

MODELS = ("Functional", "Model", "Sequential")
_CLASSES = {"Model": "Functional", "Policy": "DTypePolicy"}
_DEPTHWISE = ("DepthwiseConv1D", "DepthwiseConv2D")
_SEPARABLE = ("SeparableConv1D", "SeparableConv2D")
_TRANSPOSED = ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
_SPATIAL = ("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")
_ALL = None

# Keys that Keras 3 does not take, the values at which they change nothing, and classes.
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...] | None]] = {
    "time_major": ((False,), _ALL),
    "softmax_robust_masking": ((False,), _ALL),
    "groups": ((1,), (*_DEPTHWISE, *_SEPARABLE, *_TRANSPOSED)),
    "ragged": ((False, None), ("InputLayer",)),
    "noise_shape": ((None,), _SPATIAL),
}
# Ways of computing, and shapes that Keras 3 infers.
_DROPPED = ("batch_input_shape", "implementation", "input_length", "loss_scale")
# The same for single classes, and what these inherit and ignore.
_DROPPED_OF: Mapping[str, tuple[str, ...]] = {
    "MultiHeadAttention": ("query_shape", "key_shape", "value_shape"),
    **dict.fromkeys(
        _SEPARABLE, ("kernel_initializer", "kernel_regularizer", "kernel_constraint")
    ),
    **dict.fromkeys((*_SPATIAL, "Discretization"), ("trainable",)),
}
_CONSTANT = "_CONSTANT_VALUE"  # Keras 2 writes it in place of the name of a layer


def modern(value: JSON) -> JSON:
    """Rewrite a model, and everything in it.

    Args:
        value: Not changed. A LookupError, TypeError or AttributeError means that Keras
            has not written it.

    Example:
        >>> modern({"class_name": "LeakyReLU", "config": {"alpha": 0.5}})
        {'class_name': 'LeakyReLU', 'config': {'negative_slope': 0.5}}
    """
    if isinstance(value, list):
        return [modern(part) for part in value]
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
        return {key: modern(part) for key, part in value.items()}
    return {**value, "class_name": _CLASSES.get(kind, kind), "config": config}


def _settings(kind: str, config: dict[str, JSON]) -> dict[str, JSON]:
    made = {}
    for key, value in config.items():
        neutral, kinds = _NEUTRAL.get(key, ((), _ALL))
        unused = value in neutral and (kinds is _ALL or kind in kinds)
        if unused or key in _DROPPED or key in _DROPPED_OF.get(kind, ()):
            continue
        made[key] = modern(value)
        if key.endswith("_initializer") and isinstance(value, dict):
            inner = made[key].get("config")
            if isinstance(inner, dict):
                inner.pop("dtype", None)  # of TensorFlow 2.0
    if kind == "LeakyReLU" and "alpha" in made:
        made["negative_slope"] = made.pop("alpha")
    if kind == "InputLayer" and config.get("batch_input_shape") is not None:
        made["batch_shape"] = config["batch_input_shape"]
    axis = config.get("axis")
    if kind == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
        made["axis"] = axis[0]
    return made


def _sequential(config: JSON) -> dict[str, JSON]:
    if isinstance(config, list):  # as Keras wrote it before 2.2.3
        config = {"name": "sequential", "layers": config}
    layers = [modern(layer) for layer in config["layers"]]
    if layers and layers[0].get("class_name") != "InputLayer":
        first = config["layers"][0]["config"]
        shape = first.get("batch_input_shape") if isinstance(first, dict) else None
        if shape is not None:
            dtype = first.get("dtype")
            own = {
                "name": f"{first.get('name', 'layer')}_input",
                "batch_shape": shape,
                "dtype": dtype if isinstance(dtype, str) else "float32",
            }
            layers.insert(0, {"class_name": "InputLayer", "config": own})
    return {**config, "layers": layers}


def _functional(config: dict[str, JSON]) -> dict[str, JSON]:
    """Rewrite a graph: a layer has one node for each call.

    Keras 2 writes a node as its first argument, in which a tensor is ``[layer, node,
    tensor, other arguments]``. The first node of a nested model is its own there.
    """
    layers = [modern(layer) for layer in config["layers"]]
    config = {**config, "layers": layers}
    nodes = [node for layer in layers for node in layer["inbound_nodes"]]
    if not any(isinstance(node, list) for node in nodes):
        return config
    nested = {
        layer["name"]: layer["class_name"] in ("Functional", "Sequential")
        for layer in layers
    }
    made = [
        {**layer, "inbound_nodes": [_node(n, nested) for n in layer["inbound_nodes"]]}
        for layer in layers
    ]
    # Keras 3 subtracts the first node of a nested functional model by itself here.
    counted = {layer["name"] for layer in layers if layer["class_name"] == "Sequential"}
    outputs = _outputs(config["output_layers"], counted)
    return {**config, "layers": made, "output_layers": outputs}


def _node(node: JSON, nested: Mapping[str, bool]) -> dict[str, JSON]:
    others: dict[str, JSON] = {}
    first = _tensors(node, nested, others)
    if isinstance(first, list) and len(first) == 1:
        (first,) = first
    return {"args": [first], "kwargs": _tensors(others, nested, {})}


def _tensors(part: JSON, nested: Mapping[str, bool], others: dict[str, JSON]) -> JSON:
    """Rewrite tensors in any structure.

    Args:
        part: The structure.
        nested: Whether a layer is a model, by name.
        others: Gets the other arguments that Keras 2 writes with a tensor.
    """
    if isinstance(part, dict):
        return {key: _tensors(one, nested, others) for key, one in part.items()}
    if not isinstance(part, list):
        return part
    if not _is_reference(part) or part[0] not in {*nested, _CONSTANT}:
        return [_tensors(one, nested, others) for one in part]
    if len(part) > 3:
        others.update(part[3].items())
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
