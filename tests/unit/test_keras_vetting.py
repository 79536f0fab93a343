"""Models are of Keras' own classes, and nothing that is code gets through."""

import copy
import re
import sys

import pytest

from daskdl.errors import ModelError
from daskdl.keras.module import library, vetted


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


def test_modules_that_keras_has_not_imported_are_not():
    before = set(sys.modules)

    with pytest.raises(ModelError):
        vetted(sequential(layer("Mine", "keras.src.ops.einops_test")))

    assert set(sys.modules) == before


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


def test_what_was_given_is_not_changed():
    given = sequential(layer(activation={"class_name": "ReLU", "config": {}}))
    before = copy.deepcopy(given)

    vetted(given)

    assert given == before
