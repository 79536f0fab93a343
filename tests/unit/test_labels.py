"""What labels are held to, wherever they are loaded."""

import re

import numpy as np
import pytest

from daskdl.data.labels import LabelCheck
from daskdl.data.rehearsal import ClassRange
from daskdl.errors import DataError

TWO = ClassRange(classes=2, ignore_index=-100)


@pytest.mark.parametrize(
    ("accepted", "y"),
    [
        (None, np.array([7, -3])),
        (None, None),
        (TWO, None),
        (TWO, np.array([0, 1, -100])),
        (TWO, {"a": np.array([0]), "b": (np.array([1.5]),)}),
    ],
    ids=["any", "none", "none for classes", "classes", "tree"],
)
def test_labels_that_can_be_used_pass(accepted, y):
    assert LabelCheck(accepted).check(y, "part 1") is None


@pytest.mark.parametrize(
    ("accepted", "y", "message"),
    [
        (None, np.array([0.0, np.nan]), "y of part 1[1] is nan"),
        (TWO, np.array([0.0, np.nan]), "y of part 1[1] is nan"),
        (TWO, np.array([0, 1, 2]), "y of part 1[2] is 2, but the model gives 2"),
        (None, {"a": np.zeros(1), "b": (np.full(1, np.nan),)}, "y['b'][0] of part 1"),
    ],
    ids=["nan", "nan among classes", "class", "tree"],
)  # fmt: skip
def test_others_are_refused_with_their_place(accepted, y, message):
    with pytest.raises(DataError, match=re.escape(message)):
        LabelCheck(accepted).check(y, "part 1")


def test_of_all_labels_the_place_is_in_the_argument():
    with pytest.raises(DataError, match=r"^y\[0\] is nan"):
        LabelCheck().check(np.array([np.nan]))
