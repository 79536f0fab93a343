"""Which classes a model may be made of: those of Keras itself that run no foreign code.

Everything is looked up by name in Keras' own tables, and what a file says about where
its classes are only serves to refuse others. So nothing of a file is executed.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from daskdl.errors import ModelError
from daskdl.keras.library import library
from daskdl.keras.nodes import JSON

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
