"""Scoring one part after the other, in this process; tests/cluster has workers."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.data.inputs import ReadOptions
from daskdl.errors import DataError, OptionError
from daskdl.evaluation.evaluate import evaluate
from tests.support.sources import Parts, Streamed

ONES, TWOS = (
    (np.full((rows, 1), value, np.float32), np.zeros((rows, 1), np.float32))
    for rows, value in ((2, 1), (6, 2))
)


def loss_of(*pairs, on_bad_batch="raise", kind=Parts):
    source = kind(*pairs)
    source.first = TWOS
    read = ReadOptions(4, on_bad_batch=on_bad_batch)
    return evaluate(nn.Identity(), nn.MSELoss(), source, read, False)["loss"]


@pytest.mark.parametrize("kind", [Parts, Streamed])
def test_parts_weigh_by_their_rows(kind):
    assert loss_of(ONES, TWOS, kind=kind) == pytest.approx((2 * 1 + 6 * 4) / 8)


@pytest.mark.parametrize("error", [DataError("bad"), EOFError("torn")], ids=repr)
class TestPartThatCannotBeRead:
    def test_its_error_says_which_it_is(self, error):
        with pytest.raises(type(error)) as caught:
            loss_of(ONES, error)

        assert caught.value.__notes__[-1] == "in box 1"

    def test_it_counts_as_none_if_it_may_be_left_out(self, error, caplog):
        assert loss_of(ONES, error, TWOS, on_bad_batch="skip") == pytest.approx(3.25)
        assert caplog.messages == [
            f"box 1 is left out: {error}",
            "1 parts gave nothing to score: [1]",
        ]


def test_what_is_not_about_the_data_is_never_left_out():
    with pytest.raises(OptionError, match="pillow is missing"):
        loss_of(ONES, OptionError("pillow is missing"), on_bad_batch="skip")


def test_a_label_that_is_missing_is_such_a_part_too():
    wrong = ONES[0], np.full((2, 1), np.nan, np.float32)

    with pytest.raises(DataError, match=r"y of box 1\[0, 0\] is nan"):
        loss_of(ONES, wrong)
    assert loss_of(ONES, wrong, on_bad_batch="skip") == 1.0


def test_if_nothing_can_be_read_there_is_no_score():
    with pytest.raises(DataError, match="no examples were scored"):
        loss_of(DataError("bad"), on_bad_batch="skip")


def test_the_model_is_as_it_was():
    model = nn.Linear(1, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source = Parts(TWOS)
    source.first = TWOS

    evaluate(model.train(), nn.MSELoss(), source, ReadOptions(4), False)

    assert model.training
    assert all(torch.equal(before[n], own) for n, own in model.state_dict().items())
