"""Fits that lose replicas, one or all of them: retired, killed, or cut off."""

import asyncio
import inspect
import itertools
import logging
import os
import re
import signal
import time

import dask
import numpy as np
import pytest
import torch
from distributed import get_worker
from distributed.utils_test import poll_for

from daskdl import (
    Callback,
    ChannelError,
    Checkpoint,
    EarlyStopping,
    GradientSharing,
    ParameterAveraging,
    RunError,
)
from daskdl.channel.protocol import AGREED, NAME, WATCH
from daskdl.channel.transport import SchedulerOverDask
from daskdl.training.state import decoded
from tests.support.clusters import EnoughError, ProcessCluster, cluster_of
from tests.support.problems import halved, kept, mlp, normalised, rows, sgd, trainer
from tests.support.recording import ATOL, GRID, Recorded, delivered, records

X, Y = rows()
WITHIN_S = 60


def wait_until_closing():
    """In the thread of a replica: wait until daskdl knows that its worker closes."""
    endpoints = get_worker().extensions[NAME].endpoints
    # A replica that has left is no longer among them.
    poll_for(
        lambda: all(endpoint.closing for endpoint in [*endpoints.values()]), WITHIN_S
    )


class Leave(Callback):
    """On workers: the worker of replica 1 closes in the second epoch."""

    def on_step_end(self, step):
        if (step.replica, step.epoch) == (1, 1):
            worker = get_worker()
            worker.loop.add_callback(worker.close, executor_wait=False)
            wait_until_closing()


class Act(Callback):
    """On the client: runs a function on the rows after each epoch."""

    def __init__(self, act):
        self._act = act
        self._rows = []

    def on_epoch_end(self, row):
        self._rows.append(row)
        self._act(self._rows)


@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_the_last_replica_sends_nothing_and_is_still_scored(two, apply):
    fitted = trainer(two, master=kept(apply=apply), callbacks=[Leave()])

    history = fitted.fit(X, Y, epochs=6, batch_size=16, validation=(X, Y))

    assert history.column("replicas") == [2, 1, 1, 1, 1, 1]
    assert history[0]["sent_bytes"] > 0
    assert history.column("sent_bytes")[2:] == [0] * 4
    losses = history.column("val_loss")[1:]
    assert len(set(losses)) == len(losses)  # each epoch is scored anew
    assert max(losses[1:]) < losses[0]  # strict steps may overshoot after that
    assert losses[-1] < 0.6 * losses[0]
    fitted.client = False
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(losses[-1], rel=1e-4)


def test_the_last_replica_shares_again_with_a_joining_one(two):
    def act(rows):
        last = rows[-1]
        if last["epoch"] == 4:
            two.cluster.scale(3)
        if last["epoch"] > 5 and last["replicas"] == 2 and last["sent_bytes"] > 0:
            raise EnoughError

    fitted = trainer(two, master=GradientSharing(), callbacks=[Leave(), Act(act)])

    with pytest.raises(EnoughError):
        fitted.fit(X, Y, epochs=500, batch_size=16, validation=(X, Y))

    alone = [row for row in fitted.history_ if row["replicas"] == 1][1:]
    assert alone[0]["sent_bytes"] == 0
    before, after = alone[-1]["val_loss"], fitted.history_[-1]["val_loss"]
    assert after < 1.5 * before  # nothing was clipped that only this one had


def test_a_replica_whose_worker_closes_hands_over_its_residual(tmp_path):
    with cluster_of(3, processes=False) as client:
        fitted = trainer(
            client, master=Recorded(str(tmp_path), kept()), callbacks=[Leave()]
        )
        history = fitted.fit(X, Y, epochs=4, batch_size=8)

    ends, left = records(tmp_path, epoch=3), np.load(tmp_path / "1-left.npz")
    assert (history[0]["replicas"], sorted(ends)) == (3, [0, 2])
    start = ends[0]["start"]
    gone = left["local"] - start - left["others"] * GRID
    expected = start + sum(end["progress"] for end in ends.values()) + gone
    np.testing.assert_allclose(delivered(fitted), expected, rtol=0, atol=ATOL)


MANY = 10**4  # epochs: the fit ends otherwise


def after_epoch(epoch, action):
    """A callback that runs a function on the client after an epoch, once."""
    actions = [action]
    return Act(lambda r: r[-1]["epoch"] == epoch and actions and actions.pop()())


def retire(client, *workers):
    """Let workers close as at the end of their lifetime."""

    async def begin(dask_worker):
        # Threads of this process end in their own time.
        closing = dask_worker.close(executor_wait=False)
        asyncio.ensure_future(closing)  # noqa: RUF006

    client.run(begin, workers=list(workers) or None)


def kill(client):
    """End the processes of all workers, as the kernel would."""
    for pid in client.run(os.getpid).values():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def two():
    """A client of two workers that are threads, for a test that closes them."""
    with cluster_of(2, processes=False) as client:
        yield client


def test_losses_are_logged_on_the_client(two, caplog):
    gone = sorted(two.nthreads())[1]
    fitted = trainer(two, callbacks=[after_epoch(1, lambda: retire(two, gone))])

    with caplog.at_level(logging.INFO, logger="daskdl.training"):
        fitted.fit(X, Y, epochs=6, batch_size=16)

    records = [r for r in caplog.records if r.name.startswith("daskdl.training")]
    lost = [r for r in records if "replica 1" in r.message and gone in r.message]
    assert [r.levelno for r in lost] == [logging.WARNING]
    assert "retired" in lost[0].message


ACTS_AFTER = 6  # epoch


class Held(Callback):
    """On workers: the first two replicas train on only when their worker closes."""

    def __init__(self, after=ACTS_AFTER):
        self._after = after

    def on_epoch_begin(self, epoch):
        if epoch.epoch > self._after and epoch.replica < 2:
            wait_until_closing()


def kept_epoch(error):
    """Return the epoch whose state is in `model_`, from the note."""
    (note,) = [note for note in error.__notes__ if note.startswith("model_ holds")]
    return int(re.search("after epoch ([0-9]+)", note)[1])


def check_kept(fitted, error):
    """`model_` is the agreed state of an epoch: it scores as that did."""
    epoch = kept_epoch(error)
    scored = fitted.history_[epoch]["val_loss"]
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(scored, rel=1e-5)
    others = [row for row in fitted.history_ if row["epoch"] != epoch]
    assert scored not in [row["val_loss"] for row in others]


@pytest.mark.parametrize(
    "master",
    [
        pytest.param(kept(rejoin_timeout=0.2), id="sharing"),
        pytest.param(
            ParameterAveraging(rejoin_timeout=0.2),
            id="averaging",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_when_all_retire_the_last_agreed_model_and_the_checkpoint_are_left(
    two, master, tmp_path
):
    there = sorted(two.nthreads())
    fitted = trainer(two, master=master, model=normalised)
    fitted.callbacks = [
        Checkpoint(tmp_path),
        Held(),
        after_epoch(ACTS_AFTER, lambda: retire(two)),
    ]

    with pytest.raises(RunError) as caught:
        fitted.fit(X, Y, epochs=MANY, batch_size=16, validation=(X, Y))

    message = str(caught.value)
    assert message.startswith("all workers have retired: ")
    assert all(worker in message for worker in there)
    assert "no worker joined within 0.2 s" in message
    assert "rejoin_timeout" in message
    (note,) = [n for n in caught.value.__notes__ if "fit(resume=" in n]
    assert str(tmp_path) in note
    fitted.client = False
    check_kept(fitted, caught.value)


@pytest.mark.slow
def test_a_lost_scheduler_is_noticed_at_once_and_the_model_is_kept(tmp_path):
    with ProcessCluster(tmp_path) as cluster:
        for _ in range(2):
            cluster.grow()
        client, scheduler = cluster.client, cluster.processes[0]
        address = client.scheduler.address
        fitted = trainer(client, callbacks=[Checkpoint(tmp_path / "c"), Held()])
        fitted.callbacks.append(after_epoch(ACTS_AFTER, scheduler.kill))

        with pytest.raises(ChannelError) as caught:
            fitted.fit(X, Y, epochs=MANY, batch_size=16, validation=(X, Y))

    message = str(caught.value)
    assert re.fullmatch(
        rf"the scheduler at {address} was lost: .*; it last answered "
        r"\d+\.\d s ago",
        message,
    )
    assert str(tmp_path) in "".join(caught.value.__notes__)
    fitted.client = False
    check_kept(fitted, caught.value)


def replaced(client, *workers):
    """Let workers close, by default all, and then start two others."""
    retire(client, *workers)
    client.cluster.scale(4)


def replicas_shown(run, dask_scheduler):
    """The replicas in the section of a run on the dashboard."""
    record = dask_scheduler.extensions[NAME].dashboard.runs[int(run, 16)]
    return set(record.listed)


LATE_S = 6.0


def answer_late(cluster, operation):
    """Let the scheduler be late once too few replicas are left and the client knows.

    Returns:
        An event that is set when it answers again; then there are other workers.
    """
    scheduler, again = cluster.scheduler, asyncio.Event()
    handler = scheduler.handlers[operation]

    def go_on():
        if not again.is_set():
            cluster.scale(4)
        again.set()

    async def late(**fields):
        runs = [live.state for live in scheduler.extensions[NAME].runs.values()]
        known = operation != WATCH or not any(run.events for run in runs)
        if known and not any(run.has_enough for run in runs):
            asyncio.get_running_loop().call_later(LATE_S, go_on)
            await again.wait()
        answer = handler(**fields)
        return await answer if inspect.isawaitable(answer) else answer

    scheduler.handlers[operation] = late
    return again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "least"), [("identity", 1), (WATCH, 2)], ids=["none", "few"]
)
def test_a_fit_that_waits_for_workers_bears_a_late_scheduler(two, operation, least):
    again = []

    def act(rows):
        if rows[-1]["epoch"] == ACTS_AFTER and not again:
            again.append(answer_late(two.cluster, operation))
            retire(two, *sorted(two.nthreads())[least - 1 :])
        if again and again[0].is_set() and rows[-1]["replicas"] >= 2:
            raise EnoughError

    waiting = trainer(two, master=kept(min_replicas=least), callbacks=[Act(act)])

    with (
        dask.config.set({"daskdl.timeouts.request": "2s"}),
        pytest.raises(EnoughError),
    ):
        waiting.fit(X, Y, epochs=MANY, batch_size=16)


class SeenRates(Callback):
    """On workers: writes down the learning rate of each epoch that begins."""

    def __init__(self, folder):
        self._folder = folder

    def on_epoch_begin(self, epoch):
        path = self._folder / f"{epoch.replica}-{epoch.epoch}"
        path.write_text(repr(epoch.learning_rate))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "master",
    [
        pytest.param(kept(), id="sharing"),
        pytest.param(ParameterAveraging(), id="averaging", marks=pytest.mark.slow),
    ],
)
def test_after_the_loss_of_all_workers_the_fit_goes_on_with_others(
    two, master, checkpointed, tmp_path, caplog
):
    fitted = trainer(two, master=master, model=normalised, scheduler=halved)
    fitted.callbacks = [Held(), SeenRates(tmp_path)]
    fitted.callbacks.append(after_epoch(ACTS_AFTER, lambda: replaced(two)))
    if checkpointed:
        fitted.callbacks.append(Checkpoint(tmp_path / "checkpoints"))

    with caplog.at_level(logging.WARNING, logger="daskdl.training.fit"):
        history = fitted.fit(X, Y, epochs=10, batch_size=16, validation=(X, Y))

    assert history.column("epoch") == list(range(10))
    losses = history.column("val_loss")
    assert max(losses[7:]) < min(losses[:2])  # not from the start
    fitted.client = False
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(losses[-1], rel=1e-4)
    stayed = {r: record["left"] is None for r, record in history.run.replicas.items()}
    assert [r for r in stayed if not stayed[r]][:2] == [0, 1]
    assert min(r for r in stayed if stayed[r]) >= 2
    assert two.run_on_scheduler(replicas_shown, history.run.id) > {0, 1}
    rates = {path.name: float(path.read_text()) for path in tmp_path.glob("*-*")}
    assert min(int(n.partition("-")[0]) for n in rates if n.endswith("-9")) >= 2
    for name, rate in rates.items():
        assert rate == pytest.approx(0.05 * 0.5 ** int(name.partition("-")[2]))
    (warning,) = [r.message for r in caplog.records if "before resuming" in r.message]
    assert ("after epoch" in warning) != checkpointed
    assert (str(tmp_path) in warning) == checkpointed


def from_one():
    """Some parameters are larger than 1 after a step, which changes the grid."""
    module = mlp()
    torch.nn.init.ones_(module[-1].bias)
    return module


built = itertools.count()


def late(parameters):
    """An optimizer, which every second replica gets late."""
    if next(built) % 2:
        time.sleep(0.5)  # no wait, but the load: building takes longer than first steps
    return sgd(parameters)


def test_replicas_that_begin_again_know_the_grid_of_the_agreed_model(two):
    fitted = trainer(
        two, master=kept(warmup_steps=10**6), model=from_one, optimizer=late
    )
    fitted.callbacks = [Held(), after_epoch(ACTS_AFTER, lambda: replaced(two))]

    with dask.config.set({"daskdl.timeouts.data": "5s", "daskdl.timeouts.silence": 5}):
        history = fitted.fit(X, Y, epochs=10, batch_size=16)

    assert max(p.abs().max() for p in fitted.model_.parameters()) > 1
    assert len(history.run.replicas) >= 4
    assert not any(history.column("refused_messages"))


@pytest.mark.slow
@pytest.mark.parametrize("seem_to_close", [False, True])
def test_a_fit_goes_on_when_all_processes_were_killed(monkeypatch, seem_to_close):
    async def listens(*_):
        return True

    if seem_to_close:  # then the scheduler waits for their replicas
        monkeypatch.setattr(SchedulerOverDask, "is_listening", listens)
        monkeypatch.setattr("daskdl.channel.scheduler.GRACE_S", 60.0)
    best = EarlyStopping("val_loss", patience=MANY)
    with cluster_of(2) as client:
        fitted = trainer(client, callbacks=[Held(), best])
        fitted.callbacks.append(after_epoch(ACTS_AFTER, lambda: kill(client)))
        history = fitted.fit(X, Y, epochs=10, batch_size=16, validation=(X, Y))

    assert history.column("epoch") == list(range(10))
    assert sum(history.column("examples")) == 10 * len(X)
    fitted.client = False
    losses = history.column("val_loss")
    assert history.stopping.scores == dict(enumerate(losses))
    loss = losses[history.stopping.best_epoch]
    assert loss == min(losses)
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-4)


class Close(Callback):
    """On workers: the worker closes in an epoch, as often as there are files."""

    def __init__(self, folder, epoch, times):
        self._folder, self._epoch = folder, epoch
        for number in range(times):
            (folder / f"life-{number}").touch()

    def on_step_end(self, step):
        if step.epoch == self._epoch:
            for path in self._folder.glob("life-*"):
                path.unlink()
                worker = get_worker()
                worker.loop.add_callback(worker.close, executor_wait=False)
                wait_until_closing()
                return


def adam(parameters):
    """An optimizer whose state counts its steps."""
    return torch.optim.Adam(parameters, lr=0.01)


def direct(parameters):
    """An outer optimizer that takes each mean as it is."""
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize(
    "master",
    [
        pytest.param(GradientSharing(), id="alone"),
        pytest.param(ParameterAveraging(outer=direct), id="averaging"),
    ],
)
def test_after_the_loss_of_all_workers_the_optimizer_keeps_its_state(master, tmp_path):
    epochs, steps = 6, -(-len(X) // 16)
    quick = dask.config.set({"distributed.deploy.lost-worker-timeout": "0.1s"})
    with quick, cluster_of(1, processes=False) as client:
        client.cluster.adapt(minimum=1, maximum=1, interval="100ms", wait_count=2)
        fitted = trainer(client, master=master, optimizer=adam)
        fitted.callbacks = [Close(tmp_path, 4, times=1)]
        fitted.fit(X, Y, epochs=epochs, batch_size=16)

    assert not [*tmp_path.glob("life-*")]
    counts = {
        s["step"].item() for s in fitted.optimizer_.state_dict()["state"].values()
    }
    assert counts == {epochs * steps}


class CloseWhenFetched(Callback):
    """On workers: that of replica 0 closes when the client fetches its state."""

    def on_epoch_begin(self, epoch):
        if epoch.replica == 0:
            worker = get_worker()

            async def close(**fields):
                worker.loop.add_callback(worker.close, executor_wait=False)
                await asyncio.Event().wait()  # the connection breaks

            worker.handlers[AGREED] = close


def test_a_state_of_another_replica_than_the_first_lacks_that_of_the_optimizer(
    two, monkeypatch, caplog
):
    last = sorted(two.nthreads())[1:]
    received = []

    def decode(arrays):
        received.append(decoded(arrays))
        if len(received) == 1:
            replaced(two, *last)
        return received[-1]

    monkeypatch.setattr("daskdl.training.dask_backend.decoded", decode)
    callbacks = [Held(after=0), CloseWhenFetched()]
    fitted = trainer(two, optimizer=adam, callbacks=callbacks)

    with caplog.at_level(logging.WARNING, logger="daskdl.training.fit"):
        history = fitted.fit(X, Y, epochs=3, batch_size=16)

    (warning,) = [r.message for r in caplog.records if "before resuming" in r.message]
    assert warning.endswith("the state after epoch 0, without the optimizer's")
    assert received[0].per_replica["optimizer"]["state"] == {}
    assert history.column("epoch") == [0, 1, 2]


def test_a_fit_that_always_loses_all_at_the_same_place_ends(tmp_path):
    quick = dask.config.set({"distributed.deploy.lost-worker-timeout": "0.1s"})
    with quick, cluster_of(1, processes=False) as client:

        def adapt(least):
            options = {"interval": "100ms", "wait_count": 2}
            client.cluster.adapt(minimum=least, maximum=1, **options)

        adapt(1)
        fitted = trainer(client, callbacks=[Close(tmp_path, 0, times=1)])
        fitted.fit(X, Y, epochs=1, batch_size=16)  # goes on from the start
        assert not [*tmp_path.glob("life-*")]
        fitted.callbacks = [Close(tmp_path, 2, times=99)]
        # The cluster starts no worker then, unless the lost run wants one.
        fitted.callbacks.append(after_epoch(0, lambda: adapt(0)))
        with (
            dask.config.set({"distributed.scheduler.allowed-failures": 2}),
            pytest.raises(RunError) as caught,
        ):
            fitted.fit(X, Y, epochs=5, batch_size=16, validation=(X, Y))

    message = str(caught.value)
    assert message.startswith("all workers have retired: ")
    assert (
        "all replicas were lost, or no worker was left at the start, 2 times after "
        "resuming from the state after epoch 1" in message
    )
    fitted.client = False
    check_kept(fitted, caught.value)
