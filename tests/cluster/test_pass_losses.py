"""Workers that go while all parts are gone through once, beside training."""

import os

import numpy as np
import pytest

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


@pytest.mark.slow
def test_a_part_that_no_worker_is_left_for_waits_for_one(monkeypatch):
    source = source_of(X)

    def leave_nobody(client):
        there = client.nthreads

        def nobody():
            monkeypatch.setattr(client, "nthreads", there)
            return {}

        monkeypatch.setattr(client, "nthreads", nobody)

    refused = refused_once(monkeypatch, OSError("it has gone"), leave_nobody)
    with cluster_of(2) as client:
        found = dict(map_parts(source, first_of, client, send=True))

    assert refused
    assert found == {part: first_of(source, part) for part in range(source.parts)}


@pytest.mark.slow
def test_the_only_worker_may_be_listed_for_a_moment_when_it_has_gone(monkeypatch):
    source = source_of(X)
    refused = refused_once(monkeypatch, OSError("it has gone"))

    with cluster_of(1) as client:
        found = dict(map_parts(source, first_of, client, send=True))

    assert refused
    assert found == {part: first_of(source, part) for part in range(source.parts)}


@pytest.mark.slow
def test_the_only_worker_is_not_asked_again_when_it_hangs(monkeypatch):
    refused_once(monkeypatch, WaitTimeoutError("it hangs"))

    with cluster_of(1) as client, pytest.raises(WaitTimeoutError, match="it hangs"):
        dict(map_parts(source_of(X), first_of, client, send=True))


@pytest.mark.slow
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
