"""Passes over parts on a cluster: a task for each part, also when workers are lost."""

import os
import signal
import zlib

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import poll_for

from daskdl.data import distribute
from daskdl.data.distribute import map_parts
from daskdl.data.inputs import source_of
from daskdl.data.normalize import Standardize
from daskdl.data.source import Source
from daskdl.data.tables import InMemory
from daskdl.data.validate import validate
from daskdl.errors import DataError, WaitTimeoutError
from tests.support.clusters import cluster_of


class Boxes(Source):
    """Parts that are made where they are loaded; one may have wrong rows."""

    parts = 9
    lengths = None
    first_rows = None

    def __init__(self, wrong=None):
        self.home = os.getpid()
        self.wrong = wrong

    def load(self, part):
        if os.getpid() == self.home:
            raise AssertionError("a part was loaded where the client is")
        return self.rows(part)

    def rows(self, part):
        x = np.random.default_rng(part).normal(part, 2, (part + 1, 3))
        y = np.arange(part + 1)
        if part == self.wrong:
            x[1, 2] = np.nan
        return x, y

    def name(self, part):
        return f"box {part}"


def test_a_normalizer_is_fitted_where_the_parts_are_each_time_alike(client):
    first, second = (Standardize().fit(Boxes(), client=client) for _ in range(2))

    X = np.concatenate([Boxes().rows(part)[0] for part in range(9)])
    assert first == second
    np.testing.assert_allclose(first.scalings.shift, X.mean(0), rtol=1e-13)
    np.testing.assert_allclose(first.scalings.scale, X.std(0), rtol=1e-13)


def test_nan_on_a_worker_is_refused_with_the_part(client):
    with pytest.raises(DataError, match=r"^box 7: x\[1, 2\] is nan"):
        Standardize().fit(Boxes(wrong=7), client=client)


def test_data_are_validated_where_the_parts_are(client):
    report = validate(Boxes(wrong=3), labels=8, client=client)

    assert (report.parts, report.rows) == (9, 45)
    assert report.counts["non-finite"] == report.counts["invalid label"] == 1
    assert [offender[:3] for offender in report.offenders] == [
        ("box 3", 1, "non-finite"),
        ("box 8", 8, "invalid label"),
    ]


def test_what_all_tasks_need_is_sent_to_one_worker(client, monkeypatch):
    """Copies that `scatter` makes may be left on workers, see `_PartTasks`."""
    scatter, places = Client.scatter, []

    def noting(self, values, workers, **options):
        places.append((len(workers), options.get("broadcast", False)))
        return scatter(self, values, workers=workers, **options)

    monkeypatch.setattr(Client, "scatter", noting)
    Standardize().fit(Boxes(), client=client)

    assert set(places) == {(1, False)}


FOUR_BLOCKS = 4 * distribute.BLOCK_BYTES


class Large:
    """Needs many bytes; returns their checksum."""

    def __init__(self):
        self.weights = np.random.default_rng(0).integers(0, 256, FOUR_BLOCKS, np.uint8)

    def __call__(self, source, part):
        return zlib.crc32(self.weights)


def test_each_worker_has_a_block_to_pass_on_of_what_all_tasks_need(monkeypatch):
    scatter, receivers = distribute.scatter, []

    def noting(client, data, workers, *arguments):
        receivers.extend(workers)
        return scatter(client, data, workers, *arguments)

    monkeypatch.setattr(distribute, "scatter", noting)
    function = Large()

    with cluster_of(4, processes=False) as client:
        checksums = dict(map_parts(Boxes(), function, client))
        workers = sorted(client.nthreads())

    assert checksums == dict.fromkeys(range(9), zlib.crc32(function.weights))
    assert sorted(receivers[:4]) == workers


# ---- losses

VALUES = np.arange(24.0)
SUMS = {part: float(4 * part + 1) for part in range(12)}


class Whole(Source):
    """Sent to each worker as a whole."""

    lengths = first_rows = None
    parts = 12

    def load(self, part):
        return VALUES[2 * part : 2 * part + 2], None


KINDS = pytest.mark.parametrize(
    "make",
    [
        lambda: InMemory(VALUES, None, batch_size=2),
        lambda: source_of(da.from_array(VALUES, chunks=2)),
        Whole,
    ],
    ids=["in memory", "lazy", "whole"],
)


class Dying:
    """Sums up a part; of one part, the first call or every call ends its worker."""

    def __init__(self, folder, always=False):
        self.folder = folder
        self.always = always

    def __call__(self, source, part):
        x, _ = source.load(part)
        if x.min() == 10.0 and (self.always or not self.folder.exists()):
            self.folder.mkdir(exist_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return float(x.sum())


def sums(source, client, function=lambda source, part: source.load(part)[0].sum()):
    return dict(map_parts(source, function, client, send=True))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("workers", [3, 1])
def test_a_part_whose_worker_is_lost_is_done_on_another(tmp_path, make, workers):
    function = Dying(tmp_path / "died")

    with cluster_of(workers) as client:
        totals = sums(make(), client, function)

    assert function.folder.exists()
    assert totals == SUMS


def test_what_all_tasks_need_is_sent_again_if_a_part_of_it_is_lost(monkeypatch):
    scatter, receivers = distribute.scatter, []

    def losing_the_second(client, data, workers, *arguments):
        futures = scatter(client, data, workers, *arguments)
        receivers.extend(workers)
        if len(receivers) == 2:
            [second] = [
                worker
                for worker in client.cluster.workers.values()
                if worker.address == receivers[1]
            ]
            client.cluster.sync(second.close)
        return futures

    monkeypatch.setattr(distribute, "scatter", losing_the_second)
    function = Large()

    with cluster_of(2, processes=False) as client:
        checksums = dict(map_parts(Boxes(), function, client))

    assert checksums == dict.fromkeys(range(9), zlib.crc32(function.weights))
    assert len(receivers) > 3  # two blocks of the function, and one of the source


def test_a_worker_that_hangs_gets_no_block_of_what_all_tasks_need(threads, monkeypatch):
    scatter, receivers = distribute.scatter, []

    def hanging_once(client, data, workers, *arguments):
        receivers.extend(workers)
        if len(receivers) == 2:
            raise WaitTimeoutError("it hangs")
        return scatter(client, data, workers, *arguments)

    monkeypatch.setattr(distribute, "scatter", hanging_once)
    function = Large()

    checksums = dict(map_parts(Boxes(), function, threads))

    assert checksums == dict.fromkeys(range(9), zlib.crc32(function.weights))
    answers, hangs, *later = receivers
    assert hangs != answers
    assert later == [answers, answers]


@pytest.mark.slow
@KINDS
def test_a_part_that_ends_its_workers_is_an_error(tmp_path, make):
    with (
        cluster_of(2) as client,
        pytest.raises(
            (DataError, RuntimeError), match=r"was lost with its worker|attempts"
        ),
    ):
        sums(make(), client, Dying(tmp_path / "died", always=True))


@pytest.mark.slow
def test_parts_go_to_the_workers_that_are_still_there(tmp_path):
    source, values = InMemory(VALUES, None, batch_size=1), {}

    with cluster_of(2) as client:
        numbers = map_parts(source, lambda _, part: part, client, send=True)
        for part, number in numbers:
            values[part] = number
            if len(values) == 1:
                client.retire_workers([min(client.nthreads())])

    assert values == {part: part for part in range(24)}


def refusing(monkeypatch, kind, times, then=lambda client: None):
    """The first parts cannot be sent."""
    scatter, refused = distribute.scatter, []

    def refuse(client, content, *arguments):
        if len(refused) == times or "daskdl-part" not in str(*content):
            return scatter(client, content, *arguments)
        refused.append(content)
        then(client)
        raise kind("it is away")

    monkeypatch.setattr(distribute, "scatter", refuse)
    return refused


def hide_workers(monkeypatch):
    def hide(client):
        def nobody():
            monkeypatch.setattr(client, "nthreads", there)
            return {}

        there = client.nthreads
        monkeypatch.setattr(client, "nthreads", nobody)

    return hide


@pytest.mark.parametrize("listed", [True, False])
def test_a_part_waits_for_a_worker_when_all_have_left(threads, monkeypatch, listed):
    then = (lambda client: None) if listed else hide_workers(monkeypatch)
    refused = refusing(monkeypatch, OSError, 2, then)
    monkeypatch.setattr(distribute, "LISTED_S", 0.0)

    assert sums(InMemory(VALUES, None, batch_size=2), threads) == SUMS
    assert len(refused) == 2


def test_a_part_that_no_worker_takes_is_an_error(threads, monkeypatch):
    refusing(monkeypatch, OSError, 10**6)
    monkeypatch.setattr(distribute, "LISTED_S", 0.0)

    with pytest.raises(DataError, match="part 0 was lost with its worker 4 times"):
        sums(InMemory(VALUES, None, batch_size=2), threads)


def test_workers_that_hang_are_not_asked_again(threads, monkeypatch):
    refused = refusing(monkeypatch, WaitTimeoutError, 10**6)

    with pytest.raises(WaitTimeoutError, match="it is away"):
        sums(InMemory(VALUES, None, batch_size=2), threads)
    assert len(refused) == 2  # one for each worker


@pytest.mark.slow
def test_no_worker_is_waited_for_without_end(monkeypatch):
    def leave(client):
        client.cluster.scale(0)
        poll_for(lambda: not client.nthreads(), timeout=20)

    refusing(monkeypatch, OSError, 1, leave)

    with (
        cluster_of(1, processes=False) as client,
        dask.config.set({"daskdl.timeouts.join": "0.5s"}),
        pytest.raises(WaitTimeoutError, match=r"no worker joined within 0\.5 s"),
    ):
        sums(InMemory(VALUES, None, batch_size=2), client)
