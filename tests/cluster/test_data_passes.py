"""Normalisers and validation: one task for each part, the same result as without."""

import os
import signal

import dask.array as da
import numpy as np
import pytest
from distributed import KilledWorker

from daskdl.data import distribute
from daskdl.data.distribute import map_parts
from daskdl.data.inputs import source_of
from daskdl.data.normalize import Standardize
from daskdl.data.source import Source
from daskdl.data.tables import InMemory
from daskdl.data.validate import validate
from daskdl.errors import DataError, OptionError
from tests.support.clusters import cluster_of


class Boxes(Source):
    """Parts that are made where they are loaded; one has rows that are wrong."""

    parts = 9
    lengths = None
    first = None

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


def test_a_normaliser_is_fitted_where_the_parts_are(client):
    fitted = Standardize().fit(Boxes(), client=client)

    X = np.concatenate([Boxes().rows(part)[0] for part in range(9)])
    np.testing.assert_allclose(fitted.scalings.shift, X.mean(0), rtol=1e-13)
    np.testing.assert_allclose(fitted.scalings.scale, X.std(0), rtol=1e-13)


def test_each_fit_gives_the_same_digits(client):
    one, two = (Standardize().fit(Boxes(), client=client) for _ in range(2))

    assert one == two


def test_nan_on_a_worker_is_refused_with_the_part(client):
    with pytest.raises(DataError, match=r"^box 7: x\[1, 2\] is nan"):
        Standardize().fit(Boxes(wrong=7), client=client)


def test_data_are_validated_where_the_parts_are(client):
    report = validate(Boxes(wrong=3), labels=8, client=client)

    assert (report.parts, report.rows) == (9, 45)
    assert report.counts["non-finite"] == report.counts["invalid label"] == 1
    assert [one[:3] for one in report.offenders] == [
        ("box 3", 1, "non-finite"),
        ("box 8", 8, "invalid label"),
    ]


def once(folder, action):
    """Do something the first time that this is called, on any worker."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    action()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    """Sums up a part; the first call, or each one of one part, ends its worker."""

    def __init__(self, folder, poison=None):
        self.folder = folder
        self.poison = poison

    def __call__(self, source, part):
        x, _ = source.load(part)
        if self.poison is None:
            once(self.folder, die)
        elif x.min() == self.poison:
            die()
        return float(x.sum())


VALUES = np.arange(24.0)


def in_memory():
    return InMemory(VALUES, None, batch_size=2)


def lazy():
    return source_of(da.from_array(VALUES, chunks=2))


class Whole(Source):
    """Sent to each worker as a whole."""

    lengths = first = None
    parts = 12

    def load(self, part):
        return VALUES[2 * part : 2 * part + 2], None


KINDS = {"in memory": in_memory, "lazy": lazy, "whole": Whole}


def test_a_part_that_no_worker_takes_is_an_error(threads, monkeypatch):
    scatter = distribute.scatter

    def refuse(client, content, *arguments):
        if "daskdl-part" in str(*content):
            raise OSError("gone")
        return scatter(client, content, *arguments)

    monkeypatch.setattr(distribute, "scatter", refuse)
    monkeypatch.setattr(distribute, "LISTED_S", 0.0)

    with pytest.raises(DataError, match="part 0 was lost with its worker 4 times"):
        dict(map_parts(in_memory(), lambda source, part: 0, threads, send=True))


@pytest.fixture
def mortal():
    """A client of three workers, which may all be dead in the end."""
    with cluster_of(3) as client:
        yield client


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_part_whose_worker_is_lost_is_done_on_another(mortal, tmp_path, kind):
    function = Dying(tmp_path / "died")

    results = dict(map_parts(KINDS[kind](), function, mortal, send=True))

    assert (tmp_path / "died").exists()
    assert results == {
        part: VALUES[2 * part : 2 * part + 2].sum() for part in range(12)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_ends_every_worker_ends_the_pass(mortal, tmp_path, kind):
    function = Dying(tmp_path, poison=10.0)

    # Where nobody is left to send a part to, that is what is said.
    with pytest.raises((OptionError, KilledWorker, OSError)):
        dict(map_parts(KINDS[kind](), function, mortal, send=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in memory", "lazy"])
def test_it_ends_before_all_workers_are_gone(mortal, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(distribute, "MOST_LOSSES", 1)
    function = Dying(tmp_path, poison=10.0)

    with pytest.raises(DataError, match=r"^part \d+ was lost with its worker 2 times"):
        dict(map_parts(KINDS[kind](), function, mortal, send=True))
