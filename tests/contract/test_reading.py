"""What the options of a run say of how its data are read."""

import dataclasses

import pytest
import torch

from daskdl import GradientSharing
from daskdl.data.inputs import ReadOptions
from daskdl.training.data_feed import Reading
from daskdl.training.epoch_control import EvaluationPlan
from daskdl.training.fit_spec import ReplicaSpec
from tests.support.run_states import TIMEOUTS

OPTIONS = ReplicaSpec(
    objective=torch.nn.functional.mse_loss,
    optimizer=torch.optim.SGD,
    read=ReadOptions(8, on_bad_batch="skip"),
    model=torch.nn.Linear(1, 1),
    rows=(None, None),
    run=1,
    master=GradientSharing(),
    epochs=3,
    epochs_before=4,
    seed=7,
    evaluation=EvaluationPlan(3, validates=True),
    size=10,
    grid=1e-3,
    outbox_bytes=1,
    inbox_bytes=1,
    timeouts=TIMEOUTS,
    prefetch=5,
)


def options(**changes):
    return dataclasses.replace(OPTIONS, **changes)


def test_each_epoch_of_each_fit_has_an_order_of_rows_of_its_own():
    assert OPTIONS.reading("train", 2) == Reading("train", (7, 6), 8, 5, None, True)


@pytest.mark.parametrize(("phase", "shuffle"), [("validation", True), ("train", False)])
def test_rows_that_are_not_shuffled_keep_their_order(phase, shuffle):
    assert options(shuffle=shuffle).reading(phase, 2).seed is None


@pytest.mark.parametrize(
    ("prefetch", "threads"), [(0, 1), (1, 1), (3, 3), (4, 4), (100, 4)]
)
def test_few_parts_are_loaded_together_and_one_at_least(prefetch, threads):
    assert options(prefetch=prefetch).load_threads == threads
