"""What Keras 2 writes is rewritten as Keras 3 writes it."""

import copy
import json
from pathlib import Path

import pytest

from daskdl.keras.convert import modern

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
