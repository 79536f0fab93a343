import json
import pickle

import numpy as np
import pytest
import torch

from daskdl.data.normalize import Normalization, Scaling, alike
from daskdl.errors import DataError, OptionError

HALF = Scaling(np.array([1.0]), np.array([2.0]))
TENTH = Scaling(np.array([0.1, 1 / 3]), np.array([10.0, 1 / 7]), -1.0)
FITTED = Normalization({"a": HALF, 3: (TENTH, None)})


def batch():
    x = {
        "a": torch.tensor([[5]]),
        3: (torch.tensor([[0.1, 1 / 3]]), torch.tensor([7])),
    }
    return x, torch.tensor([1])


@pytest.mark.parametrize("function", [Normalization.transform, Normalization.__call__])
def test_x_of_a_batch_is_scaled_and_all_else_comes_out_as_it_went_in(function):
    given = batch()

    x, y = function(FITTED, given)

    assert list(x) == ["a", 3]
    assert x["a"].tolist() == [[2.0]]
    assert x[3][0].ravel().tolist() == pytest.approx([-1.0, -1.0])
    assert x[3][1] is given[0][3][1]
    assert y is given[1]


def test_there_need_be_no_labels():
    x, y = Normalization(HALF).transform((np.array([[3.0]]), None))

    assert x.tolist() == [[1.0]]
    assert y is None


def test_the_inverse_gives_x_back():
    x, _ = batch()

    back = FITTED.inverse(FITTED.transform((x, None))[0])

    assert back["a"].tolist() == [[5.0]]
    assert back[3][1] is x[3][1]


def test_a_dict_in_another_order_is_the_same_x():
    x, y = batch()
    reordered = {3: x[3], "a": x["a"]}

    scaled, _ = FITTED.transform((reordered, y))

    assert list(scaled) == [3, "a"]
    assert scaled["a"].tolist() == [[2.0]]


@pytest.mark.parametrize("function", ["transform", "inverse"])
def test_x_of_another_structure_is_refused(function):
    x = {"a": torch.zeros(1, 1)}
    given = (x, None) if function == "transform" else x

    with pytest.raises(
        DataError,
        match=r"fitted on x like {'a': \., 3: \(\., \.\)}, got {'a': \.}",
    ):
        getattr(FITTED, function)(given)


def test_it_goes_through_json_and_is_equal_to_the_last_digit():
    text = json.dumps(FITTED.to_dict(), allow_nan=False)

    assert Normalization.from_dict(json.loads(text)) == FITTED


def test_it_is_equal_after_a_journey_and_only_then():
    assert pickle.loads(pickle.dumps(FITTED)) == FITTED
    assert Normalization(HALF) != Normalization(TENTH)


@pytest.mark.parametrize(
    "plain",
    [{}, None, {"x": {"shift": [1.0]}}, {"x": {"tuple": 3}}, {"x": ["shift"]}],
    ids=str,
)
def test_another_dict_is_refused(plain):
    with pytest.raises(OptionError, match=r"not what Normalization.to_dict\(\) return"):
        Normalization.from_dict(plain)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ({"a": 1, "b": (2, 3)}, {"b": (4, 5), "a": 6}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({0: 1}, {"0": 1}, False),
        ((1, 2), (1, (2,)), False),
    ],
)
def test_alike_are_trees_with_arrays_in_the_same_places(one, two, expected):
    assert alike(one, two) is expected
