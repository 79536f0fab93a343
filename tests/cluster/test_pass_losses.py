"""Workers that go while all parts are gone through once, beside training."""

import os

import dask
import numpy as np
import pytest
from distributed.utils_test import poll_for

from daskdl.data import distribute
from daskdl.data.distribute import map_parts
from daskdl.data.inputs import source_of
from daskdl.errors import DataError, WaitTimeoutError
from tests.support.clusters import cluster_of

pytestmark = pytest.mark.slow

X = np.arange(640.0).reshape(320, 2)


def first_of(source, part):
    return float(source.load(part)[0][0, 0])


def end_worker(source, part):
    if part == 1:
        os._exit(1)
    return part


def test_parts_go_to_the_workers_that_are_still_there():
    source = source_of(X)
    found = {}

    with cluster_of(2) as client:
        for part, number in map_parts(source, first_of, client, send=True):
            found[part] = number
            if len(found) == 1:
                client.retire_workers([min(client.nthreads())])

    assert found == {part: first_of(source, part) for part in range(source.parts)}


def refused_once(monkeypatch, error, then=lambda client: None):
    """The first part cannot be sent."""
    scatter, refused = distribute.scatter, []

    def refuse(client, content, *args):
        if refused or "daskdl-part" not in str(*content):
            return scatter(client, content, *args)
        refused.append(content)
        then(client)
        raise error

    monkeypatch.setattr(distribute, "scatter", refuse)
    return refused


@pytest.mark.parametrize("listed", [True, False])
def test_a_part_waits_for_another_worker_when_the_only_one_has_left(
    monkeypatch, listed
):
    def leave_nobody(client):
        def nobody():
            monkeypatch.setattr(client, "nthreads", there)
            return {}

        there = client.nthreads
        monkeypatch.setattr(client, "nthreads", there if listed else nobody)

    source = source_of(X)
    refused = refused_once(monkeypatch, OSError("it has gone"), leave_nobody)
    with cluster_of(1) as client:
        found = dict(map_parts(source, first_of, client, send=True))

    assert refused
    assert found == {part: first_of(source, part) for part in range(source.parts)}


def test_the_only_worker_is_not_asked_again_when_it_hangs(monkeypatch):
    refused_once(monkeypatch, WaitTimeoutError("it hangs"))

    with cluster_of(1) as client, pytest.raises(WaitTimeoutError, match="it hangs"):
        dict(map_parts(source_of(X), first_of, client, send=True))


class Once:
    """Ends its worker once."""

    def __init__(self, folder):
        self.path = str(folder / "died")

    def __call__(self, source, part):
        if part == 5 and not os.path.exists(self.path):
            open(self.path, "x").close()
            os._exit(1)
        return first_of(source, part)


@pytest.mark.parametrize("send", [True, False], ids=["apart", "as a whole"])
def test_function_and_source_are_sent_again_to_the_worker_that_replaces_the_only_one(
    send, tmp_path
):
    source = source_of(X) if send else source_of(Numbers())

    with cluster_of(1) as client:
        found = dict(map_parts(source, Once(tmp_path), client, send=send))

    assert found == {part: first_of(source, part) for part in range(source.parts)}


def test_no_worker_is_waited_for_without_end(tmp_path, monkeypatch):
    no_worker = refused_once(monkeypatch, OSError("it has gone"), leave)

    with (
        cluster_of(1, processes=False) as client,
        dask.config.set({"daskdl.timeouts.join": "0.5s"}),
        pytest.raises(WaitTimeoutError, match=r"no worker came within 0\.5 s"),
    ):
        dict(map_parts(source_of(X), first_of, client, send=True))

    assert no_worker


def leave(client):
    client.cluster.scale(0)
    poll_for(lambda: not client.nthreads(), timeout=20)


@pytest.mark.parametrize("send", [True, False], ids=["apart", "as a whole"])
def test_a_part_that_ends_its_workers_is_an_error(send):
    source = source_of(X) if send else source_of(Numbers())

    with (
        cluster_of(2) as client,
        pytest.raises(
            (DataError, RuntimeError), match=r"was lost with its worker|attempts"
        ),
    ):
        dict(map_parts(source, end_worker, client, send=send))


class Numbers:
    """A dataset, which goes to each worker as a whole."""

    def __len__(self):
        return 320

    def __getitem__(self, i):
        return X[i], i

    def __getitems__(self, several):
        return [self[i] for i in several]
