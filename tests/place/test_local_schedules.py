"""Learning-rate schedules of several replicas, among threads."""

import itertools
import math
import threading

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR

from daskdl import Callback, OptionError
from tests.support.problems import ShardedStream, halved, kept, plateau, rows, trainer

X, Y = rows()


def slowly(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)


def steps_of(rate):
    """Return the number of steps of `slowly`."""
    return round(math.log(rate / 0.05, 0.99))


class Noting(torch.optim.SGD):
    """Records its learning rates, by thread."""

    seen = ()

    def step(self, closure=None):
        name = threading.current_thread().name
        Noting.seen += ((name, self.param_groups[0]["lr"]),)
        return super().step(closure)


@pytest.fixture
def seen(monkeypatch):
    """A function that returns the learning rates of a replica's steps."""
    monkeypatch.setattr(Noting, "seen", ())

    def rates(replica):
        name = f"daskdl-replica-{replica}"
        return [rate for thread, rate in Noting.seen if thread == name]

    return rates


def noting(parameters):
    return Noting(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("apply", "scale"), [("eager", "mean"), ("strict", "mean"), ("strict", "sum")]
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_epoch_has_one_rate_for_all(seen, replicas, apply, scale):
    options = {"apply": apply, "update_scale": scale, "max_staleness": 0}
    master = kept(replicas_per_worker=replicas, **options)
    fitted = trainer(False, optimizer=noting, scheduler=halved, master=master)

    history = fitted.fit(X, Y, epochs=3, batch_size=16)

    rates = [0.05, 0.025, 0.0125]
    assert history.column("learning_rate") == rates
    factor = 1 / replicas if (apply, scale) == ("strict", "mean") else 1.0
    for replica in range(replicas):
        each = [rate for rate, _ in itertools.groupby(seen(replica))]
        assert each == [rate * factor for rate in rates]
    assert fitted.optimizer_.param_groups[0]["lr"] == 0.00625
    assert fitted.scheduler_.last_epoch == 3


STALLED = threading.Event()


class Stall(Callback):
    """Stalls the second replica for most of the first epoch."""

    def on_step_end(self, step):
        if step.replica == 1 and step.number == 1:
            assert STALLED.wait(90)
        if step.replica == 0 and step.number == 41:
            STALLED.set()


def test_a_slower_replica_catches_up_at_the_end_of_the_epoch(seen):
    STALLED.clear()
    fitted = trainer(
        False,
        optimizer=noting,
        scheduler=slowly,
        scheduler_every="step",
        master=kept(replicas_per_worker=2, max_staleness=None, update_scale="sum"),
        callbacks=[Stall()],
    )

    history = fitted.fit(X, Y, epochs=2, batch_size=8)

    ahead, behind = ([steps_of(rate) for rate in seen(i)] for i in (0, 1))
    first_steps = steps_of(
        history[0]["learning_rate"]
    )  # in the first epoch, by the first
    assert first_steps > 40  # of 60
    assert ahead == list(range(len(ahead)))
    own_steps = behind.index(first_steps)
    assert own_steps == 60 - first_steps
    later = range(first_steps, first_steps + len(behind) - own_steps)
    assert behind == [*range(own_steps), *later]
    assert fitted.scheduler_.last_epoch == max(ahead[-1], behind[-1]) + 1


def test_a_plateau_scheduler_gets_the_validation_loss(seen):
    master = kept(replicas_per_worker=2, max_staleness=0)
    fitted = trainer(False, optimizer=noting, scheduler=plateau, master=master)
    wrong = (X, (Y + 1) % 4)  # gets worse while the training loss falls

    history = fitted.fit(X, Y, epochs=4, batch_size=16, validation=wrong)

    losses, rates = history.column("val_loss"), history.column("learning_rate")
    assert losses == sorted(losses)  # or the test shows nothing
    assert rates == [0.05, 0.05, 0.025, 0.0125]
    assert {*seen(0), *seen(1)} == set(rates)


@pytest.mark.parametrize(
    "options", [{"scheduler": halved}, {"scheduler": slowly, "scheduler_every": "step"}]
)
def test_another_fit_continues_the_schedule(options):
    rates = []
    for fits, epochs in ((1, 2), (2, 1)):
        master = kept(replicas_per_worker=2, max_staleness=0)
        fitted = trainer(False, master=master, **options)
        rows = [
            row["learning_rate"]
            for _ in range(fits)
            for row in fitted.fit(X, Y, epochs=epochs, batch_size=80)
        ]
        rates.append((rows, fitted.scheduler_.last_epoch))

    assert rates[0] == rates[1]
    assert rates[0][0][0] != rates[0][0][1]


def test_a_fit_that_fails_keeps_the_state_and_the_schedule_of_the_one_before():
    fitted = trainer(False, scheduler=halved)
    fitted.fit(X, Y, epochs=2)
    before = fitted.optimizer_.state_dict()["state"]

    class Fail(Callback):
        def on_step_end(self, step):
            if step.epoch == 1:
                raise RuntimeError

    fitted.callbacks = [Fail()]
    with pytest.raises(RuntimeError):
        fitted.fit(X, Y, epochs=2)

    assert fitted.scheduler_.last_epoch == 2
    assert fitted.optimizer_.param_groups[0]["lr"] == 0.0125
    after = fitted.optimizer_.state_dict()["state"]
    assert after.keys() == before.keys() != set()
    for number, state in before.items():
        momentum = after[number]["momentum_buffer"]
        assert torch.equal(momentum, state["momentum_buffer"])


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {}),
        ({"accumulate": 3}, {}),
        ({}, {"drop_last": True}),
        ({}, {"validation": 0.3}),
    ],
)
def test_the_steps_of_a_replica_are_known_before(seen, replicas, options, more):
    master = kept(replicas_per_worker=replicas, max_staleness=0)
    fitted = trainer(False, optimizer=noting, master=master, **options)
    batches = {"epochs": 2, "batch_size": 17, **more}

    steps = fitted.steps(X, **batches)
    fitted.fit(X, Y, **batches)

    assert max(len(seen(replica)) for replica in range(replicas)) == steps


def test_a_one_cycle_that_has_come_to_its_end_keeps_its_rate(caplog):
    steps = trainer(False).steps(X, 2)
    assert steps == 30
    rates = []
    for total in (steps, 20):
        fitted = trainer(
            False,
            scheduler=lambda o, total=total: OneCycleLR(o, 0.1, total_steps=total),
            scheduler_every="step",
        )
        rates.append(fitted.fit(X, Y, epochs=2)[-1]["learning_rate"])

    assert rates == pytest.approx([0.1 / 25 / 1e4] * 2)  # torch's smallest
    (record,) = [
        candidate for candidate in caplog.records if "OneCycleLR" in candidate.message
    ]
    assert record.message.startswith("OneCycleLR has reached its end, total_steps=20, ")


def test_the_steps_of_a_stream_are_not_known():
    with pytest.raises(OptionError, match=r"unknown for a stream.* set total_steps"):
        trainer(False).steps(ShardedStream(10))


def test_a_too_short_one_cycle_names_the_steps_it_needs():
    def fit(total):
        fitted = trainer(
            False, scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=total)
        )
        return fitted.fit(X, Y, epochs=5)

    with pytest.raises(OptionError, match=r"total_steps=3, before .*total_steps=5 or"):
        fit(3)
    assert len(fit(5)) == 5
