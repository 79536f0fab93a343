"""Which examples are the worst: exactly, whatever the parts."""

import itertools
import math
import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl import WorstExample, WorstExamples
from daskdl.evaluation.per_example import (
    Found,
    Guessed,
    Scored,
    example_of,
    worst_of,
    worst_rows,
)

LOSSES = st.sampled_from(
    [0.0, -0.0, 1.0, 1.0, 2.5, -1.0, math.inf, -math.inf, math.nan]
)


def scored(losses, ignored=None, guessed=None):
    ignored = np.zeros(len(losses), bool) if ignored is None else np.array(ignored)
    return Scored(np.array(losses, dtype=float), ignored, guessed)


def found(losses, part=0, start=0):
    return [
        Found(part, WorstExample(loss, f"part {part}", start + i))
        for i, loss in enumerate(losses)
    ]


def places(worst):
    return [(one.part, one.example.row) for one in worst]


def by_hand(losses):
    """Missing ones first, then the largest; of equal ones the first."""
    order = sorted(
        range(len(losses)),
        key=lambda i: -math.inf if math.isnan(losses[i]) else -losses[i],
    )
    missing = [i for i, loss in enumerate(losses) if math.isnan(loss)]
    return missing + [i for i in order if i not in missing]


@given(losses=st.lists(LOSSES, max_size=12), top=st.integers(1, 15))
def test_the_rows_of_a_part_are_in_the_order_of_the_merge(losses, top):
    rows = worst_rows(scored(losses), top, wrong_only=False)

    assert rows.tolist() == by_hand(losses)[:top]
    merged = worst_of(found(losses), top)
    assert [row for _, row in places(merged)] == rows.tolist()


@given(
    losses=st.lists(LOSSES, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
    top=st.integers(1, 6),
    seed=st.randoms(),
)
def test_the_worst_of_parts_worst_are_the_worst_of_all(losses, cuts, top, seed):
    edges = [0, *sorted(min(cut, len(losses)) for cut in cuts), len(losses)]
    parts = [
        worst_of(found(losses[a:b], part), top)
        for part, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    seed.shuffle(parts)

    merged = []
    for part in parts:
        merged = worst_of([*merged, *part], top)

    rows = [edges[part] + row for part, row in places(merged)]
    assert rows == by_hand(losses)[:top]


def test_what_the_loss_ignores_is_passed_over():
    own = scored([1.0, math.nan, math.nan, 2.0], [False, True, False, False])

    assert worst_rows(own, 9, wrong_only=False).tolist() == [2, 3, 0]


def test_what_was_predicted_right_may_be_left_out():
    guessed = Guessed(np.array([0, 1, 2]), np.array([0, 2, 1]), None)
    own = scored([9.0, 1.0, 2.0], guessed=guessed)

    assert worst_rows(own, 9, wrong_only=True).tolist() == [2, 1]
    assert worst_rows(own, 9, wrong_only=False).tolist() == [0, 2, 1]


def test_an_example_has_copies_of_its_own():
    x, y = {"a": np.arange(6.0).reshape(3, 2)}, np.array([0, 1, 2])
    guessed = Guessed(y, np.array([0, 2, 1]), np.array([0.5, 0.25, 0.125]))

    one = example_of(1, ("a.npz", 7), scored([1, 2, 3], guessed=guessed), (x, y))
    x["a"][:] = 0

    assert one == WorstExample(
        *(2.0, "a.npz", 7), label=1, predicted=2, probability=0.25
    )
    np.testing.assert_array_equal(one.x["a"], [2.0, 3.0])
    assert one.x["a"].base is None
    assert one.y == 1


@pytest.fixture
def worst():
    examples = (
        WorstExample(math.nan, "s3://b/1.npz", 4, 34, "k34", 2, 0, math.nan),
        WorstExample(2.5, "s3://b/0.npz", 1, 1, "k1", 1, 0, 0.0821),
    )
    return WorstExamples(examples, 90, ("cat", "dog"))


def test_it_reads_like_a_table(worst):
    assert str(worst).splitlines() == [
        "the worst 2 of 90 examples",
        "      loss  label     predicted       p  where",
        "       nan  2         cat           nan  "
        "row 34 (s3://b/1.npz, row 4), key 'k34'",
        "    2.5000  dog       cat        0.0821  "
        "row 1 (s3://b/0.npz, row 1), key 'k1'",
    ]
    assert repr(worst) == "<WorstExamples: 2 of 90>"


def test_without_classes_there_is_no_guess_to_show():
    own = WorstExamples((WorstExample(2.5, "shard 0 of 2", 3),), 10)

    assert str(own).splitlines()[1:] == [
        "      loss  where",
        "    2.5000  shard 0 of 2, row 3",
    ]


def test_none_are_shown_as_none():
    assert str(WorstExamples((), 10)).startswith("the worst 0 of 10 examples")


def test_pandas_gets_a_row_for_each(worst):
    table = worst.to_pandas()

    assert list(table["key"]) == ["k34", "k1"]
    assert list(table["number"]) == [34, 1]
    assert table["probability"].isna().tolist() == [True, False]
    assert list(table.columns) == [
        *("loss", "label", "predicted", "probability"),
        *("part", "row", "number", "key"),
    ]
    assert isinstance(WorstExamples((), 0).to_pandas(), pd.DataFrame)


def test_it_is_a_sequence_that_travels(worst):
    assert len(worst) == 2
    assert worst[1] in worst
    assert list(worst[:1]) == [worst[0]]
    assert str(pickle.loads(pickle.dumps(worst))) == str(worst)
