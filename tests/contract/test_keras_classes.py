"""Models are of Keras' own classes, as either Keras writes them; code is refused."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from daskdl.errors import ModelError, OptionError
from daskdl.keras.module import library, modern, vetted


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


def first_of(made):
    return made["config"]["layers"][0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (layer("Capsule"), "layer 'mine' is or has a Capsule"),
        (layer("Mine", "__main__"), "layer 'mine' is or has a __main__.Mine"),
        (layer("Dense", "os.path"), "is or has a os.path.Dense"),
        (layer("Dense", "keras_evil"), "is or has a keras_evil.Dense"),
        (layer("Mine", None), "is or has a Mine"),
        ({**layer(), "registered_name": "my>Dense"}, "is or has a my>Dense"),
        (layer("InputSpec"), "is or has a InputSpec"),
        (layer(["Dense"]), "is or has a ['Dense']"),
        (layer("get_file", "keras.src.ops.numpy"), "keras.src.ops.numpy.get_file"),
        (layer("Add", "keras.src.ops.nowhere"), "keras.src.ops.nowhere.Add"),
        (layer("CoreOpsTest", "keras.src.ops.core_test"), "core_test.CoreOpsTest"),
        (
            layer(kernel_initializer={"class_name": "Evil", "config": {}}),
            "layer 'mine' is or has a Evil",
        ),
        (layer("Wrapper", layer=layer("Capsule")), "is or has a Capsule"),
    ],
    ids=str,
)
def test_other_classes_are_refused_by_name(given, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        vetted(sequential(given))


@pytest.mark.parametrize(
    "key", ["kernel_initializer", "bias_regularizer", "activation"]
)
def test_what_the_program_has_registered_is_not_called_by_a_file(key, monkeypatch):
    monkeypatch.setitem(library().saving.get_custom_objects(), "mine>it", pytest.fail)

    with pytest.raises(ModelError, match="layer 'mine' is or has a mine>it"):
        vetted(sequential(layer(**{key: "mine>it"})))


@pytest.mark.parametrize(
    "given",
    [
        layer("Lambda", function="x"),
        layer("TorchModuleWrapper"),
        layer("TFSMLayer"),
        layer("JaxLayer"),
        layer("FlaxLayer"),
        layer(activation={"class_name": "__lambda__", "config": {"value": "x"}}),
        layer(spec={"class_name": "__typespec__", "config": []}),
    ],
    ids=str,
)
def test_code_is_refused(given):
    with pytest.raises(ModelError, match=r"'mine' is a .* made of code; nothing of a"):
        vetted(sequential(given))


@pytest.mark.parametrize("kind", ["TextVectorization", "StringLookup"])
def test_vocabularies_are_refused(kind):
    with pytest.raises(ModelError, match=f"layer 'mine' is a {kind}; turn words"):
        vetted(sequential(layer(kind)))


@pytest.mark.parametrize("name", ["get_file", "__init__.x", ["relu"]], ids=str)
def test_a_function_must_be_an_activation(name):
    function = {"module": "keras.utils", "class_name": "function", "config": name}

    with pytest.raises(ModelError, match="which is no activation of Keras"):
        vetted(sequential(layer(activation=function)))


def test_an_activation_is_written_by_name():
    function = {"module": "builtins", "class_name": "function", "config": "relu"}

    made = vetted(sequential(layer(activation=function)))

    assert first_of(made)["config"]["activation"] == "relu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kernel_constraint": {"class_name": "MaxNorm", "config": {}}},
            "layer 'mine' has a constraint, .*; set kernel_constraint to null",
        ),
        ({"bias_constraint": "max_norm"}, "set bias_constraint to null"),
        ({"stateful": True}, "layer 'mine' has stateful=True"),
        (
            {
                "dtype": {
                    "class_name": "QuantizedDTypePolicy",
                    "config": {"name": "int8"},
                }
            },
            "layer 'mine' is quantised",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_by_name(settings, message):
    with pytest.raises(ModelError, match=message):
        vetted(sequential(layer(**settings)))


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
def test_each_class_is_looked_for_where_keras_has_it(settings, module):
    ((key, kind),) = settings.items()

    made = vetted(sequential(layer(**{key: {"class_name": kind, "config": {}}})))

    found = first_of(made)["config"][key]
    assert (found["module"], found["class_name"]) == (module, kind)


def test_a_sum_of_outputs_is_an_operation_of_keras():
    made = vetted(sequential(layer("Add", "keras.src.ops.numpy")))

    assert first_of(made)["module"] == "keras.src.ops.numpy"


def test_what_a_model_was_compiled_with_and_built_for_is_left_out():
    given = {**layer(), "build_config": {}, "compile_config": {"optimizer": "adam"}}

    made = vetted(sequential(given))

    assert first_of(made).keys() == layer().keys()


def test_vetting_does_not_change_what_was_given():
    given = sequential(layer(activation={"class_name": "ReLU", "config": {}}))
    before = copy.deepcopy(given)

    vetted(given)

    assert given == before


MODELS = Path(__file__).parents[1] / "keras_models"


def settings(kind, **config):
    """What becomes of the settings of a layer."""
    return modern({"class_name": kind, "config": config})["config"]


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("InputLayer", {"batch_input_shape": [None, 3]}, {"batch_shape": [None, 3]}),
        ("InputLayer", {"ragged": False}, {}),
        ("InputLayer", {"ragged": True}, {"ragged": True}),
        ("Dense", {"batch_input_shape": [None, 3]}, {}),
        ("Embedding", {"input_length": 7}, {}),
        ("LSTM", {"implementation": 2, "time_major": False}, {}),
        ("LSTM", {"time_major": True}, {"time_major": True}),
        ("DepthwiseConv2D", {"groups": 1}, {}),
        ("DepthwiseConv2D", {"groups": 2}, {"groups": 2}),
        ("SeparableConv2D", {"groups": 1}, {}),
        (
            "SeparableConv1D",
            {"kernel_constraint": {}, "use_bias": True},
            {"use_bias": True},
        ),
        ("Conv2DTranspose", {"groups": 1}, {}),
        ("Conv2DTranspose", {"groups": 2}, {"groups": 2}),
        ("Conv2D", {"groups": 1}, {"groups": 1}),
        ("SpatialDropout2D", {"noise_shape": None, "trainable": True}, {}),
        ("SpatialDropout1D", {"noise_shape": [2]}, {"noise_shape": [2]}),
        ("Dropout", {"noise_shape": None}, {"noise_shape": None}),
        ("Discretization", {"trainable": True}, {}),
        ("MultiHeadAttention", {"query_shape": [None, 3], "value_shape": [1]}, {}),
        ("MultiHeadAttention", {"softmax_robust_masking": False}, {}),
        ("BatchNormalization", {"axis": [3]}, {"axis": 3}),
        ("BatchNormalization", {"axis": -1}, {"axis": -1}),
        ("LayerNormalization", {"axis": [1]}, {"axis": [1]}),
        ("LeakyReLU", {"alpha": 0.3}, {"negative_slope": 0.3}),
        ("ELU", {"alpha": 0.3}, {"alpha": 0.3}),
    ],
    ids=str,
)
def test_settings_are_those_of_keras_3(kind, config, expected):
    assert settings(kind, **config) == expected


def test_a_policy_has_its_new_name():
    policy = {"class_name": "Policy", "config": {"name": "mixed_float16"}}

    made = settings("Dense", dtype={**policy, "config": {"loss_scale": {}}})

    assert made["dtype"] == {"class_name": "DTypePolicy", "config": {}}


def test_an_initialiser_has_no_dtype():
    initialiser = {
        "class_name": "GlorotUniform",
        "config": {"seed": 3, "dtype": "float32"},
    }

    made = settings("Dense", kernel_initializer=initialiser)

    assert made["kernel_initializer"]["config"] == {"seed": 3}


def test_a_layer_in_a_wrapper_is_rewritten_too():
    inner = {"class_name": "LSTM", "config": {"time_major": False, "units": 2}}

    made = settings("Bidirectional", layer=inner)

    assert made["layer"]["config"] == {"units": 2}


def dense(**config):
    return {"class_name": "Dense", "config": {"name": "dense", **config}}


@pytest.mark.parametrize("dtype", ["float32", {"class_name": "Policy", "config": {}}])
def test_the_first_layer_of_a_sequential_model_says_what_goes_in(dtype):
    first = dense(batch_input_shape=[None, 3], dtype=dtype)

    made = settings("Sequential", name="s", layers=[first, dense()])

    assert [layer["class_name"] for layer in made["layers"]] == [
        "InputLayer",
        "Dense",
        "Dense",
    ]
    assert made["layers"][0]["config"] == {
        "name": "dense_input",
        "batch_shape": [None, 3],
        "dtype": "float32",
    }


def test_a_sequential_model_may_be_a_list_of_layers():
    first = dense(batch_input_shape=[None, 3])

    made = modern({"class_name": "Sequential", "config": [first]})

    assert made["config"]["name"] == "sequential"
    assert len(made["config"]["layers"]) == 2


def test_an_input_layer_that_is_there_is_the_only_one():
    first = {"class_name": "InputLayer", "config": {"batch_input_shape": [None, 3]}}

    made = settings("Sequential", name="s", layers=[first, dense()])

    assert [layer["class_name"] for layer in made["layers"]] == ["InputLayer", "Dense"]


def test_a_model_that_is_a_graph_is_called_functional():
    made = modern(
        {
            "class_name": "Model",
            "config": {"layers": [], "input_layers": [], "output_layers": []},
        }
    )

    assert made["class_name"] == "Functional"


@pytest.mark.parametrize("name", ["cifar10_keras3", "two_by_two_keras3"])
def test_what_keras_3_has_written_stays_as_it_is(name):
    config = json.loads((MODELS / f"{name}.json").read_text())
    expected = copy.deepcopy(config)
    for layer in expected["config"]["layers"]:
        if layer["class_name"] == "InputLayer":
            layer["config"].pop("ragged", None)  # False, which is what it is without

    assert modern(config) == expected


def test_what_was_given_is_not_changed():
    config = json.loads((MODELS / "two_by_two_keras2.json").read_text())
    before = copy.deepcopy(config)

    modern(config)

    assert config == before


LOADED = """
import os, sys
import daskdl, daskdl.keras
from daskdl.keras.module import library
print('keras' in sys.modules)
print(library().backend.backend(), 'KERAS_BACKEND' in os.environ)
"""


def said(script, **environment):
    """What a new process says; `KERAS_BACKEND` is only as given."""
    inherited = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        env={**inherited, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "chosen",
    [{}, pytest.param({"KERAS_BACKEND": "torch"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_backend_is_torch_from_the_first_use_on(tmp_path, chosen):
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')

    imported, backend, is_set = said(LOADED, KERAS_HOME=str(tmp_path), **chosen)

    assert (imported, backend) == ("False", "torch")
    assert is_set == str(bool(chosen))


def refused(message):
    """What is expected of a first use; the one of this process is remembered."""
    return pytest.raises(OptionError, match=re.escape(message))


def test_another_backend_in_the_environment_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "jax")

    with refused(
        "Keras models are trained on Keras' backend 'torch', and KERAS_BACKEND is "
        "'jax' in this process; set it to torch, or unset it, also on the workers"
    ):
        library.__wrapped__()


def test_keras_that_was_imported_with_another_backend_is_refused(monkeypatch):
    backend = SimpleNamespace(backend=lambda: "jax")
    fake = SimpleNamespace(__version__="3.15.1", backend=backend)
    monkeypatch.setitem(sys.modules, "keras", fake)
    monkeypatch.setenv("KERAS_BACKEND", "torch")

    with refused(
        "Keras models are trained on Keras' backend 'torch', and keras has been "
        "imported with 'jax' in this process; set KERAS_BACKEND=torch before"
    ):
        library.__wrapped__()


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (None, "which cannot be imported here: import of keras halted"),
        (SimpleNamespace(__version__="2.15.0"), "need Keras 3, got 2.15.0"),
    ],
    ids=["missing", "old"],
)
def test_keras_that_is_missing_or_old_is_refused(fake, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", fake)

    with refused(message) as caught:
        library.__wrapped__()

    assert "pip install daskdl[keras]" in str(caught.value)


def test_a_node_of_keras_2_has_tensors_constants_and_other_arguments():
    others = {"mask": ["a", 0, 0], "spec": ["none", 0, 0], "axes": [1, 2]}
    first = [["a", 0, 0, others], ["_CONSTANT_VALUE", -1, 2.5, {}]]
    layers = [
        {"class_name": "InputLayer", "config": {}, "name": "a", "inbound_nodes": []},
        {**dense(), "name": "out", "inbound_nodes": [first]},
    ]

    made = settings("Functional", layers=layers, output_layers=[["out", 0, 0]])

    config = {"shape": [], "dtype": "float32", "keras_history": ["a", 0, 0]}
    tensor = {"class_name": "__keras_tensor__", "config": config}
    assert made["layers"][1]["inbound_nodes"] == [
        {"args": [[tensor, 2.5]], "kwargs": {**others, "mask": tensor}}
    ]


@pytest.mark.parametrize(("kind", "node"), [("Functional", 1), ("Sequential", 0)])
def test_outputs_of_a_nested_model_count_as_keras_3_has_it(kind, node):
    inner = {"class_name": kind, "config": {"layers": [], "output_layers": []}}
    nodes = {"name": "inner", "inbound_nodes": [[["a", 0, 0, {}]]]}

    made = settings(
        "Functional", layers=[{**inner, **nodes}], output_layers=[["inner", 1, 0]]
    )

    assert made["output_layers"] == [["inner", node, 0]]
