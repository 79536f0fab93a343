"""Models as Keras 2 writes them, rewritten as Keras 3 writes them: JSON in, JSON out.

What both write alike passes through, so that files in between, of Keras 2.13 for one,
need no case of their own. Whether a class is known is not looked at here.
"""

from collections.abc import Mapping
from typing import Any

from daskdl.keras.nodes import JSON, modern_graph

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
