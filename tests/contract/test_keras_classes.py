"""Models are of Keras' own classes, as either Keras writes them; code is refused."""

import copy
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from daskdl.errors import ModelError, OptionError
from daskdl.keras.module import library, to_keras3, vetted
from tests.support.processes import in_a_fork


def layer(kind="Dense", module="keras.layers", **settings):
    config = {"name": "mine", **settings}
    return {
        "module": module,
        "class_name": kind,
        "config": config,
        "registered_name": None,
    }


def sequential(*layers):
    return {"class_name": "Sequential", "config": {"name": "s", "layers": [*layers]}}


def first_of(config):
    return config["config"]["layers"][0]


def function(name):
    return {"module": "keras.utils", "class_name": "function", "config": name}


def policy(kind, **config):
    return {"class_name": kind, "config": config}


CLASSES = {  # what is or has another class than Keras', and the name that is shown
    "Capsule": layer("Capsule"),
    "__main__.Mine": layer("Mine", "__main__"),
    "os.path.Dense": layer("Dense", "os.path"),
    "keras_evil.Dense": layer("Dense", "keras_evil"),
    "Mine": layer("Mine", None),
    "my>Dense": {**layer(), "registered_name": "my>Dense"},
    "InputSpec": layer("InputSpec"),
    "['Dense']": layer(["Dense"]),
    "keras.src.ops.numpy.get_file": layer("get_file", "keras.src.ops.numpy"),
    "keras.src.ops.nowhere.Add": layer("Add", "keras.src.ops.nowhere"),
    "keras.src.ops.core_test.CoreOpsTest": layer(
        "CoreOpsTest", "keras.src.ops.core_test"
    ),
    "Evil": layer(kernel_initializer={"class_name": "Evil", "config": {}}),
    "Wrapped": layer("Wrapper", layer={**layer("Wrapped"), "config": {}}),
}
OTHERS = [
    *[
        (layer(kind), f"is a {kind}, which contains code, and code")
        for kind in ("Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer")
    ],
    *[
        (layer(activation={"class_name": kind, "config": {}}), "which contains code")
        for kind in ("__lambda__", "__typespec__")
    ],
    *[
        (layer(kind), f"is a {kind}; convert words")
        for kind in ("TextVectorization", "StringLookup")
    ],
    *[
        (layer(activation=function(name)), "which is not one of Keras' activations")
        for name in ("get_file", "__init__.x", ["relu"])
    ],
    (layer(kernel_constraint=policy("MaxNorm")), "set kernel_constraint to null"),
    (layer(bias_constraint="max_norm"), "has a constraint, "),
    (layer(stateful=True), "has stateful=True"),
    (layer(dtype=policy("QuantizedDTypePolicy", name="int8")), "is quantized"),
]


@pytest.mark.parametrize(
    ("layer_config", "message"),
    [(layer_config, f"is or has a {shown},") for shown, layer_config in CLASSES.items()]
    + OTHERS,
    ids=str,
)
def test_other_classes_and_code_are_refused_by_name(layer_config, message):
    with pytest.raises(ModelError, match=f"layer 'mine' .*{re.escape(message)}"):
        vetted(sequential(layer_config))


@pytest.mark.parametrize(
    "key", ["kernel_initializer", "bias_regularizer", "activation"]
)
def test_custom_objects_of_the_program_are_refused(key, monkeypatch):
    monkeypatch.setitem(library().saving.get_custom_objects(), "mine>it", pytest.fail)

    with pytest.raises(ModelError, match="layer 'mine' is or has a mine>it"):
        vetted(sequential(layer(**{key: "mine>it"})))


def test_an_activation_is_written_by_name():
    config = vetted(sequential(layer(activation=function("relu"))))

    assert first_of(config)["config"]["activation"] == "relu"


@pytest.mark.parametrize(
    ("settings", "module"),
    [
        ({"kernel_initializer": "Identity"}, "keras.initializers"),
        ({"layer": "Identity"}, "keras.layers"),
        ({"activity_regularizer": "L2"}, "keras.regularizers"),
        ({"activation": "ReLU"}, "keras.layers"),
        ({"dtype": "DTypePolicy"}, "keras"),
        ({"layer": "Functional"}, "keras.src.models.functional"),
        ({"layer": "Sequential"}, "keras"),
    ],
    ids=str,
)
def test_classes_are_looked_up_in_their_keras_module(settings, module):
    ((key, kind),) = settings.items()

    config = vetted(sequential(layer(**{key: {"class_name": kind, "config": {}}})))

    value = first_of(config)["config"][key]
    assert (value["module"], value["class_name"]) == (module, kind)


MODELS = Path(__file__).parents[1] / "keras_models"


def settings(kind, **config):
    """What becomes of the settings of a layer."""
    return to_keras3({"class_name": kind, "config": config})["config"]


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("InputLayer", {"batch_input_shape": [None, 3]}, {"batch_shape": [None, 3]}),
        ("InputLayer", {"ragged": False}, {}),
        ("Dense", {"batch_input_shape": [None, 3]}, {}),
        ("Embedding", {"input_length": 7}, {}),
        ("LSTM", {"implementation": 2, "time_major": False}, {}),
        ("LSTM", {"time_major": True}, {"time_major": True}),
        (
            "SeparableConv2D",
            {"kernel_initializer": "zeros", "kernel_constraint": {}, "groups": 1},
            {},
        ),
        ("Conv2DTranspose", {"groups": 1, "use_bias": True}, {"use_bias": True}),
        ("Conv2D", {"groups": 1}, {"groups": 1}),
        ("SpatialDropout2D", {"noise_shape": None, "trainable": True}, {}),
        ("SpatialDropout1D", {"noise_shape": [2]}, {"noise_shape": [2]}),
        ("Dropout", {"noise_shape": None}, {"noise_shape": None}),
        ("Discretization", {"trainable": True}, {}),
        ("MultiHeadAttention", {"query_shape": [None, 3], "value_shape": [1]}, {}),
        ("MultiHeadAttention", {"softmax_robust_masking": False}, {}),
        ("BatchNormalization", {"axis": [3]}, {"axis": 3}),
        ("LayerNormalization", {"axis": [1]}, {"axis": [1]}),
        ("LeakyReLU", {"alpha": 0.3}, {"negative_slope": 0.3}),
        ("ELU", {"alpha": 0.3}, {"alpha": 0.3}),
        ("Dense", {"dtype": policy("Policy")}, {"dtype": policy("DTypePolicy")}),
        (
            "Dense",
            {"kernel_initializer": policy("GlorotUniform", seed=3, dtype="float32")},
            {"kernel_initializer": policy("GlorotUniform", seed=3)},
        ),
        (
            "Bidirectional",
            {"layer": policy("LSTM", time_major=False, units=2)},
            {"layer": policy("LSTM", units=2)},
        ),
    ],
    ids=str,
)
def test_settings_of_keras_2_are_converted(kind, config, expected):
    assert settings(kind, **config) == expected


def dense(**config):
    return {"class_name": "Dense", "config": {"name": "dense", **config}}


@pytest.mark.parametrize("dtype", ["float32", policy("Policy")], ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_the_input_shape_of_the_first_layer_becomes_an_input_layer(dtype, listed):
    layers = [dense(batch_input_shape=[None, 3], dtype=dtype), dense()]
    config = layers if listed else {"name": "sequential", "layers": layers}

    updated = to_keras3({"class_name": "Sequential", "config": config})["config"]

    kinds = [layer["class_name"] for layer in updated["layers"]]
    assert (updated["name"], kinds) == ("sequential", ["InputLayer", "Dense", "Dense"])
    assert updated["layers"][0]["config"] == {
        "name": "dense_input",
        "batch_shape": [None, 3],
        "dtype": "float32",
    }
    assert (
        to_keras3({"class_name": "Sequential", "config": updated})["config"] == updated
    )


@pytest.mark.parametrize(
    "rewrite", [to_keras3, lambda config: vetted(to_keras3(config))]
)
def test_the_given_description_is_not_changed(rewrite):
    config = json.loads((MODELS / "two_by_two_keras2.json").read_text())
    before = copy.deepcopy(config)

    rewrite(config)

    assert config == before


def loaded(home):
    """Whether Keras was there before its first use, and what that has set."""
    os.environ.pop("KERAS_BACKEND", None)
    os.environ["KERAS_HOME"] = home
    before = "keras" in sys.modules
    return before, library().backend.backend(), "KERAS_BACKEND" in os.environ


def test_the_backend_is_torch_from_the_first_use_on(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')

    assert in_a_fork(loaded, str(tmp_path)) == (False, "torch", False)


OTHER = "Keras models need Keras' backend 'torch', but "


@pytest.mark.parametrize(
    ("version", "backend", "chosen", "message"),
    [
        (
            None,
            None,
            "jax",
            f"{OTHER}KERAS_BACKEND is 'jax' in this process; set it to",
        ),
        (
            "3.15.1",
            "jax",
            "torch",
            f"{OTHER}Keras has been imported with 'jax' in this",
        ),
        ("none", None, "torch", "cannot be imported here: import of keras halted"),
        ("2.15.0", "torch", "torch", "need Keras 3, got 2.15.0"),
    ],
)
def test_an_unsuitable_keras_is_refused(version, backend, chosen, message, monkeypatch):
    fake = SimpleNamespace(
        __version__=version, backend=SimpleNamespace(backend=lambda: backend)
    )
    if version is None:
        monkeypatch.delitem(sys.modules, "keras", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "keras", None if version == "none" else fake)
    monkeypatch.setenv("KERAS_BACKEND", chosen)

    with pytest.raises(OptionError, match=re.escape(message)):
        library.__wrapped__()  # what the first use comes to is remembered


def test_a_node_of_keras_2_has_tensors_constants_and_other_arguments():
    others = {"mask": ["a", 0, 0], "spec": ["none", 0, 0], "axes": [1, 2]}
    first = [["a", 0, 0, others], ["_CONSTANT_VALUE", -1, 2.5, {}]]
    layers = [
        {"class_name": "InputLayer", "config": {}, "name": "a", "inbound_nodes": []},
        {**dense(), "name": "out", "inbound_nodes": [first]},
    ]

    functional = settings("Functional", layers=layers, output_layers=[["out", 0, 0]])

    config = {"shape": [], "dtype": "float32", "keras_history": ["a", 0, 0]}
    tensor = {"class_name": "__keras_tensor__", "config": config}
    assert functional["layers"][1]["inbound_nodes"] == [
        {"args": [[tensor, 2.5]], "kwargs": {**others, "mask": tensor}}
    ]


@pytest.mark.parametrize(("kind", "node"), [("Functional", 1), ("Sequential", 0)])
def test_output_nodes_of_nested_models_are_renumbered(kind, node):
    inner = {"class_name": kind, "config": {"layers": [], "output_layers": []}}
    nodes = {"name": "inner", "inbound_nodes": [[["a", 0, 0, {}]]]}

    functional = settings(
        "Functional", layers=[{**inner, **nodes}], output_layers=[["inner", 1, 0]]
    )

    assert functional["output_layers"] == [["inner", node, 0]]
