"""Calls from Dask tasks and within `dask.annotate`, on a cluster of one slot."""

import dask
import dask.array
import numpy as np
import pytest
from distributed import get_client, secede, worker_client

import daskdl
from daskdl.errors import OptionError
from tests.support.clusters import cluster_of
from tests.support.problems import mlp, rows, trainer

X, Y = rows(count=96)


@pytest.fixture(scope="module")
def one_slot():
    with cluster_of(1, threads_per_worker=1) as client:
        yield client


def fit(client):
    fitted = trainer(client)
    fitted.fit(X, Y, epochs=1, batch_size=16)
    return fitted


def evaluate(client):
    return daskdl.evaluate(mlp(), X, Y, loss="cross_entropy", client=client)


def with_get_client(method):
    method(get_client())
    return True


def with_secede(method):
    client = get_client()
    secede()
    method(client)
    return True


def with_worker_client(method):
    with worker_client() as client:
        method(client)
    return True


@pytest.mark.parametrize("method", [fit, evaluate])
@pytest.mark.parametrize("way", [with_get_client, with_secede, with_worker_client])
def test_a_task_may_call_where_its_worker_has_one_thread(one_slot, way, method):
    assert one_slot.submit(way, method, pure=False).result(timeout=100)


@pytest.mark.parametrize("method", [fit, evaluate])
@pytest.mark.parametrize(
    "annotation",
    [{"resources": {"GPU": 1}}, {"workers": "a"}, {"allow_other_workers": True}],
)
def test_an_enclosing_placement_is_refused_by_name(one_slot, annotation, method):
    (name,) = annotation

    with dask.annotate(**annotation), pytest.raises(OptionError, match=f"{name}="):
        method(one_slot)


def test_annotations_of_data_and_of_urgency_are_allowed(one_slot):
    with dask.annotate(resources={"GPU": 1}):
        x = dask.array.from_array(X, chunks=(48, -1))

    with dask.annotate(priority=1, retries=2):
        fitted = trainer(one_slot)
        fitted.fit(x, dask.array.from_array(Y, chunks=48), epochs=1, batch_size=16)

    assert np.isfinite(fitted.history_[-1]["loss"])
