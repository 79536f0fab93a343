"""What labels are held to, one by one and all of a tree."""

import re

import numpy as np
import pytest
import torch

from daskdl.data.checks import ClassRange, LabelCheck, check_labels
from daskdl.errors import DataError

NAN = float("nan")
THREE = ClassRange(3, -100)


@pytest.mark.parametrize(
    "labels",
    [
        None,
        np.array([0.5, np.inf, -1.0]),
        np.array([-1, 99]),
        torch.tensor([0.5]),
        {"a": np.array([1.5]), "b": (np.array([7]), torch.tensor([[1.0, 2.0]]))},
    ],
    ids=["none", "floats", "integers", "tensor", "tree"],
)
def test_without_classes_anything_is_accepted_but_nan(labels):
    LabelCheck().check(labels)


@pytest.mark.parametrize(
    ("labels", "where"),
    [
        (np.array([0.5, np.nan, np.nan]), "y[1] is nan"),
        (torch.tensor([[0.0, NAN]]), "y[0, 1] is nan"),
        ({"a": np.zeros(1), "b": np.array([np.nan])}, "y['b'][0] is nan"),
        ((np.zeros(1), np.array([np.nan])), "y[1][0] is nan"),
    ],
    ids=["array", "tensor", "dict", "tuple"],
)
@pytest.mark.parametrize("accepted", [None, THREE], ids=["any", "classes"])
def test_nan_is_refused_with_its_place(labels, where, accepted):
    message = f"^{re.escape(where)}; remove such examples, or fill them in$"

    with pytest.raises(DataError, match=message):
        LabelCheck(accepted).check(labels)


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_class_that_there_is_not_is_refused(wrong):
    message = rf"^y\[2\] is {wrong}, but the model gives 3 outputs"

    with pytest.raises(DataError, match=message):
        LabelCheck(THREE).check(np.array([0, 2, wrong]))


def test_each_array_of_a_tree_is_held_to_the_classes():
    with pytest.raises(DataError, match=r"^y\['b'\]\[0\] is 3, but"):
        LabelCheck(THREE).check({"a": np.array([2]), "b": np.array([3])})


def test_an_ignored_label_is_accepted_and_others_are_not():
    check = LabelCheck(ClassRange(3, -100))

    check.check(np.array([0, -100]))

    with pytest.raises(DataError, match=r"y\[1\] is -99"):
        check.check(np.array([0, -99]))


def test_the_message_says_what_the_labels_are_of():
    with pytest.raises(DataError, match=r"^y of s3://x/7\[1\] is nan"):
        LabelCheck().check(np.array([0.0, np.nan]), "s3://x/7")


class TestCheckLabels:
    @pytest.mark.parametrize(
        ("y", "classes", "message"),
        [
            (np.array([0.0, np.nan]), None, "y[1] is nan; remove such examples"),
            (torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), None, "y[1, 1] is nan"),
            (np.array([0, 3, 9]), 3, "y[1] is 3, but the model gives 3 outputs: "
             "labels must be in [0, 3)"),
            (np.array([0, -1]), 3, "y[1] is -1"),
            (np.array([0, 255], np.uint8), 3, "y[1] is 255"),
        ],
        ids=["nan", "nan in a tensor", "too large", "negative", "unsigned"],
    )  # fmt: skip
    def test_the_first_wrong_label_is_shown(self, y, classes, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_labels(y, classes, "y", ignore_index=-100)

    @pytest.mark.parametrize(
        ("y", "classes"),
        [
            (np.array([0, 2, 7]), 3),
            (np.array([5, -3, 7]), None),
            (np.array([0.5, 8.0, np.inf]), 3),
            (np.array([True, False]), 1),
            (np.array([], np.int64), 3),
        ],
        ids=["ignored", "no classes", "floats", "bool", "none"],
    )
    def test_labels_that_a_loss_accepts_pass(self, y, classes):
        assert check_labels(y, classes, "y", ignore_index=7) is None
