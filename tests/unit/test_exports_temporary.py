"""Temporary batch files are there while they are used, and never afterwards."""

import asyncio
import tempfile
from pathlib import Path

import dask
import pytest

from daskdl.data.export import ExportOptions, temporary_batches
from daskdl.data.storage import Store
from daskdl.errors import OptionError, WaitTimeoutError
from tests.support.numbered import Numbered, ids_of

OPTIONS = ExportOptions(4)
BELOW = "memory://daskdl-test-temporary"


@pytest.fixture(params=["local", "configured"])
def files(request, tmp_path, monkeypatch):
    """Lists all files that there are where temporary ones are made."""
    if request.param == "local":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        yield lambda: list(map(str, tmp_path.rglob("*")))
        return
    with dask.config.set({"daskdl.export.url": BELOW}):
        yield Store(BELOW).names


def test_all_rows_are_there(files):
    with temporary_batches(Numbered([9, 5]), OPTIONS, client=False) as source:
        assert sorted(ids_of(source)) == list(range(14))
        assert source.lengths == [4, 4, 4, 2]
        assert "daskdl-export-" in files()[0]


def test_afterwards_nothing_is_there(files):
    with temporary_batches(Numbered([9, 5]), OPTIONS, client=False):
        assert files()

    assert files() == []


def fails(error):
    with temporary_batches(Numbered([9, 5]), OPTIONS, client=False):
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_there_after_a_failure(files, error):
    with pytest.raises(error):
        fails(error)

    assert files() == []


class Failing(Numbered):
    def load(self, part):
        if part == 1:
            raise KeyboardInterrupt
        return super().load(part)


def test_nothing_is_there_when_the_export_fails(files):
    with (
        pytest.raises(KeyboardInterrupt),
        temporary_batches(Failing([9, 5]), OPTIONS, client=False),
    ):
        raise AssertionError("this is never reached")

    assert files() == []


def test_two_at_a_time_do_not_disturb_each_other(files):
    with (
        temporary_batches(Numbered([9]), OPTIONS, client=False) as first,
        temporary_batches(Numbered([5]), OPTIONS, client=False) as second,
    ):
        assert (len(ids_of(first)), len(ids_of(second))) == (9, 5)


class Workers:
    """A client of workers, one of which is on another machine."""

    asynchronous = False

    def nthreads(self):
        return {"tcp://here:1": 1, "tcp://there:2": 1}

    def sync(self, function):
        return asyncio.run(function())

    async def run(self, function, workers):
        assert function()
        return {worker: "there" not in worker for worker in workers}


def test_workers_that_do_not_see_the_folder_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with (
        pytest.raises(OptionError, match=r"not seen by tcp://there:2; set daskdl\.exp"),
        temporary_batches(Numbered([9]), OPTIONS, Workers()),
    ):
        raise AssertionError("this is never reached")

    assert list(Path(tmp_path).iterdir()) == []


def test_a_worker_that_does_not_say_whether_it_sees_the_folder_is_not_waited_for(
    tmp_path, monkeypatch
):
    class Hanging(Workers):
        async def run(self, function, workers):
            await asyncio.Event().wait()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with (
        dask.config.set({"daskdl.timeouts.request": "10ms"}),
        pytest.raises(WaitTimeoutError, match="not all of tcp://here:1, tcp"),
        temporary_batches(Numbered([9]), OPTIONS, client=Hanging()),
    ):
        raise AssertionError("this is never reached")

    assert list(tmp_path.iterdir()) == []
