"""Graphs of Keras 2 become those of Keras 3."""

import pytest

from daskdl.keras.convert import modern_graph


def tensor(*history):
    config = {"shape": [], "dtype": "float32", "keras_history": list(history)}
    return {"class_name": "__keras_tensor__", "config": config}


def layer(name, *nodes, kind="Dense"):
    return {"class_name": kind, "config": {}, "name": name, "inbound_nodes": [*nodes]}


def rewritten(*layers, outputs):
    """What becomes of a model."""
    return modern_graph({"layers": [*layers], "output_layers": outputs})


def nodes_of_out(*layers):
    return rewritten(*layers, outputs=[["out", 0, 0]])["layers"][-1]["inbound_nodes"]


@pytest.mark.parametrize(
    ("node", "args"),
    [
        ([["a", 0, 0, {}]], [tensor("a", 0, 0)]),
        ([["a", 0, 0]], [tensor("a", 0, 0)]),
        (
            [["a", 0, 0, {}], ["b", 2, 1, {}]],
            [[tensor("a", 0, 0), tensor("b", 2, 1)]],
        ),
        ({"x": ["a", 0, 0, {}]}, [{"x": tensor("a", 0, 0)}]),
        (
            [["a", 0, 0, {}], ["_CONSTANT_VALUE", -1, 2.5, {}]],
            [[tensor("a", 0, 0), 2.5]],
        ),
    ],
    ids=["one", "without-others", "two", "dict", "constant"],
)
def test_the_first_argument_keeps_its_structure(node, args):
    # A dict alone does not say which Keras wrote it; the layer before it does.
    first = layer("a", [["z", 0, 0, {}]])

    (made,) = nodes_of_out(first, layer("out", node))

    assert made == {"args": args, "kwargs": {}}


def test_other_arguments_may_be_tensors_and_anything_else():
    others = {"value": ["a", 0, 0], "mask": None, "axes": [1, 2], "name": ["a", "b"]}
    node = [["b", 0, 0, others]]

    (made,) = nodes_of_out(layer("a"), layer("b"), layer("out", node))

    assert made["kwargs"] == {**others, "value": tensor("a", 0, 0)}


def test_a_list_that_only_looks_like_a_tensor_stays():
    node = [["a", 0, 0, {"spec": ["none", 0, 0]}]]

    (made,) = nodes_of_out(layer("a"), layer("out", node))

    assert made["kwargs"] == {"spec": ["none", 0, 0]}


@pytest.mark.parametrize("kind", ["Functional", "Sequential"])
def test_nodes_of_a_nested_model_count_from_0(kind):
    inner = layer("inner", [["a", 0, 0, {}]], [["b", 0, 0, {}]], kind=kind)

    (made,) = nodes_of_out(inner, layer("out", [["inner", 2, 0, {}]]))

    assert made["args"] == [tensor("inner", 1, 0)]


@pytest.mark.parametrize(("kind", "node"), [("Functional", 1), ("Sequential", 0)])
def test_outputs_of_a_nested_model_count_as_keras_3_has_it(kind, node):
    inner = layer("inner", [["a", 0, 0, {}]], kind=kind)

    made = rewritten(inner, outputs=[["inner", 1, 0]])

    assert made["output_layers"] == [["inner", node, 0]]


def test_outputs_in_a_dict_keep_their_names():
    made = rewritten(layer("out", [["a", 0, 0, {}]]), outputs=({"x": ["out", 0, 0]},))

    assert made["output_layers"] == [{"x": ["out", 0, 0]}]


def test_a_graph_of_keras_3_stays_as_it_is():
    inner = layer("inner", kind="Sequential")
    config = {
        "layers": [inner, layer("out", {"args": [tensor("inner", 0, 0)]})],
        "output_layers": ["inner", 1, 0],
    }

    assert modern_graph(config) == config
