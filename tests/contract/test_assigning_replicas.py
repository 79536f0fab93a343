import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import dask
import pytest
import torch

from daskdl.errors import OptionError, WaitTimeoutError
from daskdl.training.backend import most_replicas, replicas_here
from daskdl.training.dask_backend import assign_workers
from daskdl.training.gradient_sharing import GradientSharing


class Cluster:
    """A fake client: its workers, and their CUDA devices."""

    asynchronous = False

    def __init__(self, **devices: int) -> None:
        self.devices = devices

    def nthreads(self) -> dict[str, int]:
        return dict.fromkeys(self.devices, 4)

    def sync(self, function: Callable[[], Any]) -> Any:
        return asyncio.run(function())

    async def run(self, function: Callable[[], Any], workers: Iterable[str]) -> Any:
        assert function is torch.cuda.device_count
        return {worker: self.devices[worker] for worker in workers}


def seats(cluster, each=1, examples=1000, batch_size=10):
    master = GradientSharing(replicas_per_worker=each)
    return assign_workers(master, cluster, most(examples, batch_size))


def most(examples, step_rows=10):
    source = SimpleNamespace(lengths=None if examples is None else [examples])
    return most_replicas(source, SimpleNamespace(step_rows=step_rows))


def test_every_worker_has_a_replica_in_a_fixed_order():
    assert seats(Cluster(b=0, a=0, c=0)) == {0: "a", 1: "b", 2: "c"}


def test_auto_is_one_for_each_device_or_one_without_devices():
    assert seats(Cluster(a=0, b=3), each="auto") == {0: "a", 1: "b", 2: "b", 3: "b"}


def test_a_worker_that_does_not_report_its_devices_is_named():
    class Hanging(Cluster):
        async def run(self, function, workers):
            await asyncio.Event().wait()

    with (
        dask.config.set({"daskdl.timeouts.request": "10ms"}),
        pytest.raises(WaitTimeoutError) as caught,
    ):
        seats(Hanging(b=1, a=1), each="auto")

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

    assert caplog.messages == ["an epoch has 2 batches: 2 of 3 replicas are used"]


def test_a_cluster_without_workers_is_refused():
    with pytest.raises(OptionError, match="has no workers"):
        seats(Cluster())


def here(each=1, least=1, examples=1000):
    master = GradientSharing(replicas_per_worker=each, min_replicas=least)
    return replicas_here(master, most(examples))


@pytest.mark.parametrize(("devices", "expected"), [(0, 1), (3, 3)])
def test_auto_without_a_cluster_is_one_for_each_device(devices, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    assert here("auto") == expected


def test_min_replicas_above_the_replicas_of_this_process_are_refused():
    assert here(2, least=2) == 2
    with pytest.raises(OptionError, match=r"min_replicas must be at most 2, .* got 3"):
        here(2, least=3)
    with pytest.raises(OptionError, match=r"min_replicas must be at most 1, .* got 2"):
        here(2, least=2, examples=10)
