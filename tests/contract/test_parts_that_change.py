"""Parts that are not the same each time: an error, and neither lost rows nor a hang."""

import dask
import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Trainer
from daskdl.data.inputs import infer_metadata, source_of
from daskdl.data.source import facts_of
from daskdl.errors import DataError, RunError


class Changing:
    """Makes a part of another length from the second time on."""

    def __init__(self, *lengths):
        self.lengths = list(lengths)

    def __call__(self):
        rows = self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]
        return np.zeros((rows, 2), np.float32), np.zeros(rows, np.int64)

    def __dask_tokenize__(self):
        return id(self)


def parts_of(*lengths):
    make = Changing(*lengths)
    return [dask.delayed(make, pure=False)()]


@pytest.mark.parametrize("now", [13, 27], ids=["fewer", "more"])
def test_rows_that_were_counted_have_to_be_there_again(now):
    source = infer_metadata(source_of(parts_of(20, now)), False)

    with pytest.raises(DataError, match=f"part 0 has {now} rows, and had 20"):
        source.load(0)


def test_a_part_that_stays_the_same_is_loaded():
    source = infer_metadata(source_of(parts_of(20)), False)

    x, _ = source.load(0)

    assert x.shape == (20, 2)


def test_a_part_that_was_used_before_it_was_counted_is_held_to_the_count():
    source = source_of(parts_of(20, 20, 13))
    source.load(0)

    known = infer_metadata(source, False)

    with pytest.raises(DataError, match="had 20"):
        known.load(0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_fit_ends_with_an_error(shuffle):
    own = Trainer(
        lambda: nn.Linear(2, 2),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        client=False,
    )

    with pytest.raises((DataError, RunError), match="part 0 has 13 rows"):
        own.fit(parts_of(20, 13), batch_size=8, shuffle=shuffle)


def test_what_is_known_of_a_part_does_not_keep_the_part():
    rows = {"a": np.zeros((1000, 2))}, np.zeros(1000)

    facts = facts_of(rows)

    assert facts.first[0]["a"].base is None
    assert facts.first[1].base is None
    assert facts.rows == 1000
