import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
import torch

from daskdl.data import distribute
from daskdl.data.tables import InMemory
from daskdl.errors import ChannelError, OptionError, WaitTimeoutError
from daskdl.serialization import Packed
from daskdl.training import dask_backend
from daskdl.training.backend import most_replicas, replicas_here
from daskdl.training.dask_backend import DaskBackend, assign_workers
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.channels import bounds
from tests.support.problems import mlp, replica_spec

X = np.zeros((8, 20), np.float32)


class Cluster:
    """A fake client: its workers, their CUDA devices, and which are frozen."""

    asynchronous = False

    def __init__(self, *, frozen: Iterable[str] = (), **devices: int) -> None:
        self.devices = devices
        self.frozen = set(frozen)

    def nthreads(self) -> dict[str, int]:
        return dict.fromkeys(self.devices, 4)

    def sync(self, function: Callable[[], Any]) -> Any:
        return asyncio.run(function())

    async def run(
        self, function: Callable[[], Any], workers: Iterable[str], **options: Any
    ) -> Any:
        if not self.frozen.isdisjoint(workers):
            await asyncio.Event().wait()
        if function is not torch.cuda.device_count:
            return {worker: function() for worker in workers}
        return {worker: self.devices[worker] for worker in workers}


def seats(cluster, each=1, examples=1000, batch_size=10, device="auto"):
    master = GradientSharing(replicas_per_worker=each)
    return assign_workers(master, device, cluster, most(examples, batch_size))


def most(examples, step_rows=10):
    source = SimpleNamespace(lengths=None if examples is None else [examples])
    return most_replicas(source, SimpleNamespace(step_rows=step_rows))


def test_every_worker_has_a_replica_in_a_fixed_order():
    assert seats(Cluster(b=0, a=0, c=0)) == {0: "a", 1: "b", 2: "c"}


def test_auto_is_one_for_each_device_or_one_without_devices():
    assert seats(Cluster(a=0, b=3), each="auto") == {0: "a", 1: "b", 2: "b", 3: "b"}


ONE_PLACE = pytest.mark.parametrize("device", ["cpu", torch.device("cuda", 1)])


@ONE_PLACE
def test_auto_is_one_if_all_replicas_of_a_worker_had_the_same_device(device):
    assert seats(Cluster(a=0, b=3), each="auto", device=device) == {0: "a", 1: "b"}


@pytest.fixture
def impatient(monkeypatch):
    """Probes of workers that hang end soon."""
    monkeypatch.setattr(distribute, "ASK_S", 0.5)
    with dask.config.set({"daskdl.timeouts.request": "10ms"}):
        yield


def test_a_worker_that_does_not_report_its_devices_is_left_out(impatient, caplog):
    assert seats(Cluster(a=0, b=2, frozen="a"), each="auto") == {0: "b", 1: "b"}
    assert caplog.messages[0].startswith("no replica on a: not all of a, b said")


def test_workers_none_of_which_reports_its_devices_are_named(impatient):
    with pytest.raises(WaitTimeoutError) as caught:
        seats(Cluster(b=1, a=1, frozen="ab"), each="auto")

    assert str(caught.value) == (
        "not all of a, b said within 0.01 s (daskdl.timeouts.request) how many CUDA "
        "devices they have"
    )


@pytest.mark.parametrize(
    ("examples", "expected"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (999, 3)]
)
def test_there_are_no_more_replicas_than_batches(examples, expected):
    assert len(seats(Cluster(a=0, b=0, c=0), examples=examples)) == expected


def test_fewer_replicas_are_spread_evenly():
    assert seats(Cluster(a=0, b=0), each=3, examples=20) == {0: "a", 1: "b"}


def test_fewer_replicas_are_logged(caplog):
    with caplog.at_level("INFO", logger="daskdl.training.backend"):
        seats(Cluster(a=0, b=0, c=0), examples=20)

    assert caplog.messages == ["an epoch has 2 steps: 2 of 3 replicas are used"]


def test_a_cluster_without_workers_is_refused():
    with pytest.raises(OptionError, match="has no workers"):
        seats(Cluster())


def here(each=1, least=1, examples=1000, device="auto"):
    master = GradientSharing(replicas_per_worker=each, min_replicas=least)
    return replicas_here(master, device, most(examples))


@pytest.mark.parametrize(("devices", "expected"), [(0, 1), (3, 3)])
def test_auto_without_a_cluster_is_one_for_each_device(devices, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    assert here("auto") == here("auto", device="cuda") == expected


@ONE_PLACE
def test_auto_without_a_cluster_is_one_if_the_device_is_named(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    assert here("auto", device=device) == 1


def test_min_replicas_above_the_replicas_of_this_process_are_refused():
    assert here(2, least=2) == 2
    with pytest.raises(OptionError, match=r"min_replicas must be at most 2, .* got 3"):
        here(2, least=3)
    with pytest.raises(OptionError, match=r"min_replicas must be at most 1, .* got 2"):
        here(2, least=2, examples=10)


class Task:
    """A future of a replica's task."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.status = "pending"

    def done(self) -> bool:
        return self.status != "pending"

    def fail(self, error: Exception) -> None:
        self.status, self.error = "error", error

    def exception(self) -> Exception:
        return self.error

    def cancel(self) -> None:
        self.status = "cancelled"


class Training(Cluster):
    """The same with a scheduler, which posts events and knows no replica before.

    Args:
        events: What it posts, one at each request.
        until: Ends all tasks once it is true, at a request for events.

    Attributes:
        now: The time of the backend in seconds; each request takes a tenth.
    """

    address = "tcp://scheduler"
    id = "client"
    status = "running"

    def __init__(
        self, *events: dict[str, Any], until: Callable[["Training"], bool]
    ) -> None:
        super().__init__(a=0, b=0, c=0)
        self.slow_sends = 0  # how many messages do not arrive, although all answer
        self.opened: list[dict[int, str]] = []
        self.failures: list[Exception] = []  # of the first tasks
        self.scheduler = self
        self.tasks: list[Task] = []
        self._events = list(events)
        self._until = until
        self.now = 0.0

    async def daskdl_offer(self, **_: Any) -> Any:
        return {"status": "ok"}

    async def daskdl_put(self, **_: Any) -> Any:
        return {"status": "ok"}

    async def daskdl_spread(self, workers: Iterable[str], **_: Any) -> Any:
        if self.slow_sends > 0 or not self.frozen.isdisjoint(workers):
            self.slow_sends -= 1
            await asyncio.Event().wait()
        return {"status": "ok", "failures": {}}

    def register_plugin(self, plugin: Any) -> None:
        assert not self.opened

    async def daskdl_open(self, spec: dict[str, Any], client: str) -> Any:
        self.opened.append(spec["replicas"])
        return {"status": "ok"}

    def submit(self, *_: Any, workers: list[str], **options: Any) -> Task:
        self.tasks.append(Task(*workers))
        if self.failures:
            self.tasks[-1].fail(self.failures.pop(0))
        return self.tasks[-1]

    async def daskdl_assign(
        self, run: int, secret: int, worker: str, replicas: int
    ) -> Any:
        return {"status": "ok", "replicas": [1 + len(self.tasks)]}

    async def daskdl_unassign(self, run: int, secret: int, replica: int) -> Any:
        return {"status": "ok"}

    async def daskdl_watch(
        self, run: int, secret: int, timeout_s: float, rows: Any
    ) -> Any:
        self.now += 0.1
        assert self.now < 20, [task.worker for task in self.tasks]
        posted = [self._events.pop(0)] if self._events else []
        if not posted and self._until(self):
            for task in self.tasks:
                task.status = "finished"
        return {"status": "ok", "events": posted, "has_enough": True}


def not_joined(kind):
    """Events by which workers b and c join, and the replica on b fails to."""
    failed = {"replica": 1, "type": kind, "summary": "it waited for a snapshot"}
    return [
        {"kind": "worker", "worker": "b"},
        {"kind": "worker", "worker": "c"},
        {"kind": "not joined", **failed},
    ]


@pytest.fixture
def train(monkeypatch):
    """Follow a run with a replica on worker a to its end, in the cluster's time."""

    def train(cluster, most):
        clock = SimpleNamespace(monotonic=lambda: cluster.now)
        monkeypatch.setattr(dask_backend, "time", clock)
        master = GradientSharing(replicas_per_worker=1)
        spec = replica_spec(mlp(), master=master, timeouts=bounds(request=0.5))
        packed = Packed(spec, "trainer")
        list(DaskBackend(cluster, spec, packed, {0: "a"}, {}, most).poll_events())

    return train


@pytest.mark.parametrize("kind", ["WaitTimeoutError", "ChannelError"])
def test_a_worker_whose_replica_could_not_join_gets_another_one(kind, train, caplog):
    events = not_joined(kind)
    cluster = Training(*events, until=lambda cluster: len(cluster.tasks) == 3)

    train(cluster, most=2)  # so the one that failed must leave its place

    assert [task.worker for task in cluster.tasks] == ["b", "c", "b"]
    assert "no replica on b: it waited for a snapshot" in caplog.messages


def test_a_worker_on_which_the_users_code_fails_gets_no_other_replica(train, caplog):
    events = not_joined("ReplicaError")
    # By then, others would have got another one.
    cluster = Training(*events, until=lambda cluster: cluster.now > 3)

    train(cluster, most=3)

    assert [task.worker for task in cluster.tasks] == ["b", "c"]
    assert "no replica on b: it waited for a snapshot" in caplog.messages


@pytest.mark.parametrize("error", [ChannelError, WaitTimeoutError])
def test_a_worker_that_did_not_get_the_model_is_assigned_again(error, train, caplog):
    joins = [{"kind": "worker", "worker": worker} for worker in "bc"]
    cluster = Training(*joins, until=lambda cluster: len(cluster.tasks) == 3)
    cluster.failures.append(error("no worker has the model any more"))

    train(cluster, most=2)

    assert [task.worker for task in cluster.tasks] == ["b", "c", "b"]
    assert "no replica on b: no worker has the model any more" in caplog.messages


def test_a_worker_whose_task_fails_otherwise_is_not_assigned_again(train, caplog):
    joins = [{"kind": "worker", "worker": worker} for worker in "bc"]
    cluster = Training(*joins, until=lambda cluster: cluster.now > 3)
    cluster.failures.append(ImportError("no module"))

    train(cluster, most=3)

    assert [task.worker for task in cluster.tasks] == ["b", "c"]
    assert "replica 1 cannot join: no module" in caplog.messages


def test_the_task_of_a_worker_that_has_gone_is_not_waited_for(train):
    joins = [{"kind": "worker", "worker": worker} for worker in "bc"]
    cluster = Training(
        *joins,
        {"kind": "removed", "replica": 1},
        until=lambda cluster: cluster.tasks[0].status == "cancelled",
    )

    train(cluster, most=3)

    assert [task.worker for task in cluster.tasks] == ["b", "c"]


def backend_of(cluster):
    """A run with replicas on workers a and b that has not started yet."""
    master = GradientSharing(replicas_per_worker=1)
    spec = replica_spec(mlp(), master=master, timeouts=bounds(join=0.05))
    packed, source = Packed(spec, "trainer"), InMemory(X, X, 2)
    supply = SimpleNamespace(source=source, keys=[""] * source.parts, packed=None)
    workers = {0: "a", 1: "b"}
    return DaskBackend(cluster, spec, packed, workers, {"train": supply}, 2)


def starting(**options):
    cluster = Training(until=lambda _: True)
    vars(cluster).update(options)
    return cluster


def test_a_run_starts_without_a_worker_that_is_frozen(impatient, caplog):
    cluster = starting(frozen={"a"})

    assert backend_of(cluster).start()

    assert cluster.opened == [{1: "b"}]
    assert [task.worker for task in cluster.tasks] == ["b"]
    assert caplog.messages[0].startswith("no replica on a: the model (")


def test_a_run_starts_with_a_worker_that_was_frozen_for_a_while(impatient):
    cluster = starting(slow_sends=1)

    assert backend_of(cluster).start()

    assert cluster.opened == [{0: "a", 1: "b"}]
    assert [task.worker for task in cluster.tasks] == ["a", "b"]


@pytest.mark.parametrize("options", [{"slow_sends": 9}, {"frozen": {"a", "b"}}])
def test_a_run_does_not_start_if_the_model_reaches_nobody(impatient, options):
    cluster = starting(**options)

    with pytest.raises(WaitTimeoutError, match=r"could not be sent to a, b within"):
        backend_of(cluster).start()

    assert cluster.opened == []
