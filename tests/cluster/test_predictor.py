"""A predictor on the workers of a cluster."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from distributed.utils_test import poll_for
from torch import nn

from daskdl import ModelError, Predictor
from daskdl.channel.protocol import NAME, PUT, nbytes_of
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.errors import ChannelError
from daskdl.inference import pool
from tests.support.channels import recorded
from tests.support.clusters import Tracked, still_left_behind

X = np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32)
# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
WITHIN_S = 60.0


class Constant(Tracked):
    """Returns its value, the sum of the row, and the process id."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(float(value)))

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("there is no sum")
        process = torch.full((len(x),), float(os.getpid()), dtype=torch.float64)
        return {"value": self.value.expand(len(x)), "sum": x.sum(1), "process": process}


def extensions(dask_worker):
    names = [*dask_worker.extensions, *dask_worker.handlers]
    return [name for name in names if "predictor" in name]


def models(dask_worker):
    """Values of the models in the worker's memory."""
    return sorted(int(model.value.item()) for model in Tracked.held("Constant"))


def nothing_left(client):
    left = client.run(
        lambda dask_worker: [extensions(dask_worker), models(dask_worker)]
    )
    return {k: v for k, v in left.items() if v != [[], []]}


def parts(count):
    return [X[i % 120 : i % 120 + 1 + i % 5] for i in range(count)]


def check(part, outputs, values):
    """All rows are right, and were computed by one of these models."""
    np.testing.assert_allclose(outputs["sum"], part.sum(1), **CLOSE)
    assert len(outputs["value"]) == len(part)
    assert len(set(outputs["value"].tolist())) == 1
    assert outputs["value"][0] in values


def test_both_workers_answer_and_only_the_faulty_calls_fail(client):
    bad = X[:2] * np.nan
    asked = [bad if i % 10 == 3 else part for i, part in enumerate(parts(200))]

    with (
        Predictor(Constant(1), batch_limit=8, client=client) as predictor,
        ThreadPoolExecutor(32) as threads,
    ):
        processes = set()
        answers = [threads.submit(predictor, part) for part in asked]
        for part, answer in zip(asked, answers, strict=True):
            if part is bad:
                with pytest.raises(ModelError, match=r"2 rows.* no sum") as error:
                    answer.result(WITHIN_S)
                assert "in forward" in error.value.__notes__[0]
            else:
                check(part, answer.result(WITHIN_S), [1])
                processes.add(answer.result()["process"][0])
        tensors = predictor(torch.from_numpy(X[:3]))

    assert len(processes) == 2
    assert isinstance(tensors["sum"], torch.Tensor)
    assert nothing_left(client) == {}


def test_a_model_is_swapped_under_load_and_the_old_one_leaves_memory(client):
    stop, wrong = threading.Event(), []

    def ask(predictor, number):
        while not stop.is_set():
            part = parts(number + 1)[-1]
            check(part, predictor(part), range(6))
            number += 1

    with (
        Predictor(Constant(0), client=client) as predictor,
        ThreadPoolExecutor(8) as threads,
    ):
        asking = [threads.submit(ask, predictor, number) for number in range(8)]
        for value in range(1, 6):
            predictor.swap(Constant(value))
            after = [predictor(X[:1])["value"][0] for _ in range(4)]
            wrong += [answer for answer in after if answer != value]
        stop.set()
        for thread in asking:
            thread.result(WITHIN_S)
        there = client.run(models)

    assert wrong == []
    assert list(there.values()) == [[5], [5]]


def test_a_client_with_direct_to_workers_is_answered_too(client):
    client.direct_to_workers, before = True, client.direct_to_workers
    try:
        with Predictor(Constant(3), client=client) as predictor:
            check(X[:5], predictor(X[:5]), [3])
    finally:
        client.direct_to_workers = before
    assert nothing_left(client) == {}


MEGABYTES = 4


def large(value):
    model = Constant(value)
    model.register_buffer("weight", torch.randn(MEGABYTES * 2**18))
    return model


@pytest.fixture
def sent_bytes(client, monkeypatch):
    """A function that returns the bytes that a client has sent since the last call."""
    handlers = client.cluster.scheduler.handlers
    client.register_plugin(ChannelSchedulerPlugin())
    requests = [recorded(handlers, name, monkeypatch) for name in ("proxy", PUT)]

    def since():
        total = sum(map(nbytes_of, requests))
        for each in requests:
            each.clear()
        return total

    return since


def test_the_client_sends_a_model_once(client, sent_bytes):
    with Predictor(large(1), replicas=4, client=client) as predictor:
        at_start = sent_bytes()
        check(X[:5], predictor(X[:5]), [1])
        predictor.swap(large(2))
        at_swap = sent_bytes()
        check(X[:5], predictor(X[:5]), [2])

    for sent in (at_start, at_swap):
        assert MEGABYTES * 2**20 < sent < 1.1 * MEGABYTES * 2**20
    assert nothing_left(client) == {}
    poll_for(lambda: not any(client.run(models_received).values()), WITHIN_S)
    assert not client.cluster.scheduler.extensions[NAME].copies.held


def models_received(dask_worker):
    return len(dask_worker.extensions[NAME].copies.held)


def test_a_worker_that_has_not_received_a_model_gets_it_from_the_client(
    client, sent_bytes, monkeypatch
):
    async def fail(*args, **offer):
        raise ChannelError("not now")

    monkeypatch.setattr(pool, "send", fail)
    with Predictor(large(3), client=client) as predictor:
        check(X[:5], predictor(X[:5]), [3])

    assert sent_bytes() > 2 * MEGABYTES * 2**20


def test_workers_that_were_not_prepared_get_a_model_from_the_client(monkeypatch):
    async def leave_unprepared(dask_worker):
        pass

    monkeypatch.setattr(pool, "prepare_to_receive", leave_unprepared)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as fresh,
        Predictor(large(3), client=fresh) as predictor,
    ):
        check(X[:5], predictor(X[:5]), [3])


@pytest.mark.slow
def test_a_worker_that_is_killed_under_load_loses_no_call(three):
    asked = parts(1500)
    begun = threading.Semaphore(0)

    def ask(predictor, part):
        begun.release()
        return predictor(part)

    with (
        Predictor(Constant(1), replicas=3, batch_limit=8, client=three) as predictor,
        ThreadPoolExecutor(32) as threads,
    ):
        answers = [threads.submit(ask, predictor, part) for part in asked]
        for _ in range(300):
            assert begun.acquire(timeout=WITHIN_S)
        os.kill(int(predictor(X[:1])["process"][0]), signal.SIGKILL)
        for part, answer in zip(asked, answers, strict=True):
            check(part, answer.result(WITHIN_S), [1])
        three.wait_for_workers(3, timeout=WITHIN_S)

    assert nothing_left(three) == {}
    assert still_left_behind(three) == {}
