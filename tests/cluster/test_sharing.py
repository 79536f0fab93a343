"""Replicas per worker, routing, and traffic of frozen parameters, on a cluster."""

import contextlib
import functools
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import dask.array as da
import pytest
import torch
from distributed import get_worker
from torch import nn

from daskdl import Callback, GradientSharing
from daskdl.channel import scheduler as scheduling
from daskdl.channel.merging import merged
from daskdl.channel.protocol import NAME
from daskdl.errors import WaitTimeoutError
from daskdl.training import dask_backend
from daskdl.training.backend import merge
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Notes

X, Y = rows()


class TestSharing:
    def test_several_replicas_on_each_worker(self, client, tmp_path):
        notes = Notes(tmp_path)
        fitted = trainer(client, master=kept(replicas_per_worker=2), callbacks=[notes])

        history = fitted.fit(X, Y, epochs=6, batch_size=8)

        lines = notes.read()
        pids = {line["replica"]: line["pid"] for line in lines}
        assert sorted(pids) == [0, 1, 2, 3]
        assert len(set(pids.values())) == 2
        assert pids[0] == pids[2] != pids[1] == pids[3]
        assert history.column("replicas") == [4] * 6
        assert fitted.evaluate(X, Y)["accuracy"] > 0.85

    def test_a_replica_without_a_lease_waits_for_the_others(self, client):
        x, y = da.from_array(X, chunks=(480, 20)), da.from_array(Y, chunks=480)

        history = trainer(client).fit(x, y, epochs=2, batch_size=16)

        assert history.column("examples") == [480, 480]
        assert history.column("replicas") == [2, 2]


@dataclass
class ChannelSetting(Callback):
    """Records a setting of each replica's channel."""

    folder: Path
    name: str

    def on_step_end(self, step):
        for (_, replica), link in get_worker().extensions[NAME].endpoints.items():
            setting = getattr(link.connection.spec, self.name)
            (self.folder / str(replica)).write_text(str(setting))

    def by_replica(self):
        return {path.name: path.read_text() for path in self.folder.iterdir()}


def test_many_replicas_on_few_workers_use_the_relay(client, tmp_path):
    routing = ChannelSetting(tmp_path, "routing")
    fitted = trainer(client, master=kept(replicas_per_worker=5), callbacks=[routing])

    history = fitted.fit(X, Y, batch_size=8)

    assert history.column("replicas") == [10]
    assert routing.by_replica() == {str(replica): "plain" for replica in range(10)}


@dataclass(frozen=True)
class Routed(GradientSharing):
    """Records for how many workers it is asked for a routing."""

    workers: list = field(default_factory=list)

    def routing_for(self, workers):
        self.workers.append(workers)
        return super().routing_for(workers)


@pytest.mark.parametrize(
    ("min_replicas", "rejoin_timeout", "expected"),
    [(10, None, 2), (45, 3, 9)],
    ids=["there", "more"],
)
def test_the_routing_follows_the_workers_that_are_there_or_awaited(
    threads, min_replicas, rejoin_timeout, expected
):
    master = Routed(
        replicas_per_worker=5, min_replicas=min_replicas, rejoin_timeout=rejoin_timeout
    )
    result = contextlib.nullcontext()
    if rejoin_timeout is not None:  # the awaited workers do not come
        result = pytest.raises(WaitTimeoutError, match="min_replicas")

    with result:
        trainer(threads, master=master).fit(X, Y, batch_size=8)

    assert master.workers == [expected]


def test_updates_of_a_fit_are_merged(threads, tmp_path, monkeypatch):
    kinds, routing = Counter(), ChannelSetting(tmp_path, "routing")

    def noting(*arguments):
        messages = merged(*arguments)
        kinds.update(message.kind for message in messages)
        return messages

    monkeypatch.setattr(scheduling, "merged", noting)
    master = kept(routing="merged", replicas_per_worker=2)
    fitted = trainer(threads, master=master, callbacks=[routing])

    history = fitted.fit(X, Y, epochs=6, batch_size=8)

    assert kinds["sum"] > 0
    assert routing.by_replica() == {str(replica): "merged" for replica in range(4)}
    assert history.column("replicas") == [4] * 6
    assert fitted.evaluate(X, Y)["accuracy"] > 0.85


def test_no_worker_has_the_results_of_many_replicas(threads, monkeypatch):
    counts = []

    def counting(results):
        counts.append(len(results))
        return merge(results)

    monkeypatch.setattr(dask_backend, "merge", counting)
    fitted = trainer(threads, master=kept(replicas_per_worker=3))

    history = fitted.fit(X, Y, batch_size=8)

    assert history.column("replicas") == [6]
    assert counts == [2] * 5


class Counted(nn.Module):
    """Counts its steps in a frozen vector."""

    def __init__(self, size, changes):
        super().__init__()
        self.inner, self.changes = nn.Linear(20, 4), changes
        self.count = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x):
        if self.training and self.changes:
            self.count += 1
        return self.inner(x)


def fitted(client, size, changes):
    model = functools.partial(Counted, size, changes)
    fitted = trainer(client, model=model, master=GradientSharing())
    fitted.fit(X[:64], Y[:64], epochs=2, batch_size=16)
    return fitted


def test_averaged_arrays_count_as_sent_and_received_and_cause_one_warning(
    threads, caplog, monkeypatch
):
    monkeypatch.setattr("daskdl.training.dask_backend.MUCH_FROZEN", 2**20)
    caplog.set_level(logging.WARNING, logger="daskdl.training")

    changing, still = (fitted(threads, 200_000, changes) for changes in (True, False))

    for row in changing.history_:
        assert row["received_bytes"] == row["sent_bytes"]  # of two replicas
        assert 1_600_000 <= row["sent_bytes"] < 1_700_000
    assert all(row["sent_bytes"] < 100_000 for row in still.history_)
    (warning,) = [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]
    assert "0.8 MB on each of 2 replicas" in warning
    assert "1.6 MB" in warning
    assert "ParameterAveraging" in warning
