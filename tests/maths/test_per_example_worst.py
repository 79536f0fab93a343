"""Which examples are the worst: exactly, whatever the parts; and how they are shown."""

import itertools
import math
import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from daskdl import Trainer, WorstExample, WorstExamples
from tests.support.sources import Parts, Streamed

LOSSES = st.sampled_from(
    [0.0, -0.0, 1.0, 1.0, 2.5, -1.0, math.inf, -math.inf, math.nan]
)


def worst_first(losses):
    """Missing ones first, then the largest; of equal ones the first."""
    missing = [i for i, loss in enumerate(losses) if math.isnan(loss)]
    others = [i for i in range(len(losses)) if i not in missing]
    return missing + sorted(others, key=lambda i: -losses[i])


@settings(max_examples=40, deadline=None)
@given(
    losses=st.lists(LOSSES, min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
    top=st.integers(1, 6),
    kind=st.sampled_from([Parts, Streamed]),
)
def test_the_worst_of_all_parts_are_found_in_order(losses, cuts, top, kind):
    edges = [0, *sorted(min(cut, len(losses)) for cut in cuts), len(losses)]
    rows = np.array(losses, np.float32)[:, None]
    labels = np.zeros(len(losses), np.float32)
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    source = kind(*((rows[span], labels[span]) for span in spans))
    source.first = rows[:2], labels[:2]
    own = Trainer(nn.Identity(), lambda x, y: x.sum(), optim.SGD, client=False)
    own.model_ = own.model

    found = own.errors(source, top=top, batch_size=3)

    names = [source.name(part) for part in range(source.parts)]
    places = [edges[names.index(one.part)] + one.row for one in found]
    assert places == worst_first(losses)[:top]
    assert found.rows == len(losses)


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
