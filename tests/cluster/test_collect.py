"""What replicas left is joined, and what was lost with its worker is left out."""

import os
import signal
from types import SimpleNamespace

import pytest
from distributed import Event

from daskdl.config import Timeouts
from daskdl.errors import WaitTimeoutError
from daskdl.serialization import Packed
from daskdl.training.dask_backend import collect
from tests.maths.test_merge import result, shared

PATIENCE_S = 20


def options(data=60.0):
    bounds = {"join": 60, "request": 30, "silence": 60, "stop": 20, "rejoin": 300}
    return SimpleNamespace(run=7, timeouts=Timeouts(**bounds, data=data))


def left(client, worker, replica, residual):
    """A replica's task that has come to its end."""

    def task():
        return Packed(result(shared([1, 1]), residual=residual), "result")

    future = client.submit(task, key=f"daskdl-left-{replica}", workers=[worker])
    future.result(PATIENCE_S)
    return future


def by_name(*tasks):
    return {f"replica {replica}": task for replica, task in enumerate(tasks)}


def total(final):
    return (final.parameters.shared_N + final.carried["residual"].numpy()).tolist()


def test_results_are_joined_on_the_workers(client):
    tasks = [left(client, w, r, [r, 3]) for r, w in enumerate(client.nthreads())]

    assert total(collect(client, by_name(*tasks), options())) == [2, 7]


def test_a_task_that_is_given_up_is_left_out(client):
    worker = next(iter(client.nthreads()))
    gate = Event("daskdl-collect", client=client)
    waiting = client.submit(
        lambda: Event("daskdl-collect").wait(PATIENCE_S),
        key="daskdl-waiting",
        workers=[worker],
    )
    tasks = [left(client, [*client.nthreads()][1], 0, [2, 3]), waiting]
    waiting.cancel()

    assert total(collect(client, by_name(*tasks), options())) == [3, 4]
    gate.set()


def test_a_result_lost_with_its_worker_is_left_out(three):
    pids = three.run(os.getpid)
    doomed, survivor, _ = sorted(pids)
    tasks = [left(three, doomed, 0, [5, 5]), left(three, survivor, 1, [2, 3])]
    os.kill(pids[doomed], signal.SIGKILL)

    assert total(collect(three, by_name(*tasks), options())) == [3, 4]


def test_results_that_are_not_joined_in_time(client):
    worker = next(iter(client.nthreads()))

    with pytest.raises(
        WaitTimeoutError, match=r"daskdl\.timeouts\.data.* replica 0 is finished"
    ):
        collect(client, by_name(left(client, worker, 0, [2, 3])), options(data=1e-6))
