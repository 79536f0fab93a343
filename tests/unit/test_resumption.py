"""What a fit and its replicas go on from."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import Checkpoint, GradientSharing, ParameterAveraging
from daskdl.errors import OptionError, SaveError
from daskdl.saving.checkpoints import Stamp
from daskdl.training.base import ALONE, AVERAGER, SHARER
from daskdl.training.checkpointing import (
    Fingerprint,
    ResumePlan,
    restored_state,
    resume_plan,
)
from daskdl.training.epoch_control import StoppingDecision
from tests.support.written import put, put_part

TENSORS = {"weight": "float32 (2, 3)", "bias": "float32 (2,)"}
FINGERPRINT = Fingerprint(TENSORS, "SGD of [2] parameters", None)
DECISION = [[-1, float("nan"), -1, float("nan")], None, None, ""]
SAID = {"epoch": 0, "sync_point": None, "epochs_before": 0, "stopping": DECISION}


@pytest.fixture
def series(in_memory):
    return in_memory


def written(series, number=1, **said):
    put(
        series, number, kind=ALONE, fingerprint=FINGERPRINT.values(), **{**SAID, **said}
    )


def plan_of(url, stamp, members, kind=ALONE, fingerprint=FINGERPRINT):
    return ResumePlan(
        url, stamp, members, 1, None, [], StoppingDecision(), 0, 1, kind, fingerprint
    )


class TestFound:
    def test_at_the_url_of_a_series_it_is_the_newest(self, series):
        written(series, 1)
        written(series, 2)

        assert resume_plan(series.store.url, []).stamp.number == 2

    def test_or_the_one_at_the_url(self, series):
        written(series, 1)
        written(series, 2)

        found = resume_plan(series.folder(1).url, [])

        assert found.stamp.number == 1
        assert found.url == series.folder(1).url

    def test_rows_may_be_missing_that_no_replica_that_is_left_has_seen(self, series):
        written(series, epoch=2)

        assert resume_plan(series.store.url, []).epoch == 2

    @pytest.mark.parametrize("nothing", [None, False])
    def test_no_url_is_a_new_beginning(self, nothing):
        assert resume_plan(nothing, []) is None

    def test_a_url_without_any_is_an_error(self, series):
        with pytest.raises(SaveError, match=r"there is no checkpoint in .*checkpoints"):
            resume_plan(series.store.url, [])

    def test_one_that_is_not_whole_is_an_error_at_its_own_url(self, series):
        written(series, 1)
        series.folder(1).delete(["replica-1.json"])

        with pytest.raises(SaveError, match=r"there is no checkpoint in .*000001"):
            resume_plan(series.folder(1).url, [])

    @pytest.mark.parametrize("url", [3, 1.5, b"x", ["x"]], ids=repr)
    def test_what_is_no_url_is_refused(self, url):
        with pytest.raises(OptionError, match="must be a URL or a path"):
            resume_plan(url, [])


class TestTrue:
    def test_it_is_where_the_callback_writes(self, series):
        written(series)

        found = resume_plan(True, [Checkpoint(series.store.url)])

        assert found.stamp.number == 1

    def test_where_there_is_none_yet_it_is_a_new_beginning(self, series):
        assert resume_plan(True, [Checkpoint(series.store.url)]) is None

    def test_without_the_callback_it_is_refused(self):
        with pytest.raises(OptionError, match="resume=True needs a Checkpoint among"):
            resume_plan(True, [])


def fitted(model=None, scheduler=None):
    """A model, its optimizer and its scheduler."""
    model = nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters())
    return model, optimizer, scheduler and scheduler(optimizer)


class TestCheck:
    """The rest of what it refuses is what a `Fingerprint` does."""

    def resumed(self, kind, fingerprint=FINGERPRINT):
        return plan_of("memory://x/1", Stamp("", "", 1), [0], kind, fingerprint)

    def test_the_same_way_and_model_are_accepted(self):
        self.resumed(SHARER).check(GradientSharing(), *fitted())

    @pytest.mark.parametrize(
        ("kind", "master"),
        [(SHARER, ParameterAveraging()), (AVERAGER, GradientSharing())],
    )
    def test_another_way_is_not(self, kind, master):
        name = type(master).__name__
        with pytest.raises(OptionError, match=f"another way of training than {name}"):
            self.resumed(kind).check(master, *fitted())

    @pytest.mark.parametrize("master", [GradientSharing(), ParameterAveraging()])
    def test_of_one_replica_it_may_be_any(self, master):
        self.resumed(ALONE).check(master, *fitted())

    def test_another_model_is_not(self):
        with pytest.raises(OptionError, match="memory://x/1 is of another model: weig"):
            self.resumed(ALONE).check(GradientSharing(), *fitted(nn.Linear(3, 4)))

    def test_another_scheduler_is_not(self):
        before = Fingerprint(TENSORS, FINGERPRINT.optimizer, "LinearLR")
        own = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1))

        with pytest.raises(OptionError, match="LinearLR there, and StepLR in this tra"):
            self.resumed(ALONE, before).check(GradientSharing(), *own)


class TestInherit:
    def parts(self, series, members, founders):
        """Which parts each founder takes, and whose optimizer."""
        stamp = put(series, 1, members=members)
        plan = plan_of(series.folder(1).url, stamp, members)
        for place in range(founders):
            own = restored_state(plan, place, founders)
            taken = [int(part["own"][0]) for part in own.own]
            yield taken, int(own.donor["own"][0])

    @pytest.mark.parametrize(
        ("members", "founders", "expected"),
        [
            ([0, 1, 2], 3, [([0], 0), ([1], 1), ([2], 2)]),
            ([1, 4], 2, [([1], 1), ([4], 4)]),  # others were lost
            ([0, 1, 2, 3, 4], 2, [([0, 2, 4], 0), ([1, 3], 1)]),
            ([0, 1, 2], 1, [([0, 1, 2], 0)]),
            ([0, 1], 5, [([0], 0), ([1], 1), ([], 0), ([], 1), ([], 0)]),
        ],
        ids=["as many", "as many of other numbers", "fewer", "one", "more"],
    )
    def test_each_part_is_taken_once(self, series, members, founders, expected):
        assert list(self.parts(series, members, founders)) == expected

    def test_a_part_that_another_was_put_for_is_refused(self, series):
        stamp = put(series, 1)
        plan = plan_of(series.folder(1).url, stamp, [0, 1])
        put_part(series, Stamp("fit", "another run", 1), 1)

        restored_state(plan, 0, 2)
        with pytest.raises(SaveError, match=r"replica-1.json is of another checkpoint"):
            restored_state(plan, 1, 2)

    def test_a_part_that_is_missing_is_named(self, series):
        stamp = put(series, 1)
        plan = plan_of(series.folder(1).url, stamp, [0, 1])
        series.folder(1).delete(["replica-1.json"])

        with pytest.raises(SaveError, match=r"replica-1.json: there is no such file"):
            restored_state(plan, 1, 2)
