"""Exports on a cluster: the same files as anywhere, whoever dies meanwhile."""

import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from typing_extensions import override

from daskdl.data.batch_files import BatchFiles
from daskdl.data.export import ExportOptions, Progress, export, temporary_batches
from daskdl.data.storage import Store
from daskdl.errors import DataError
from tests.support.clusters import still_left_behind
from tests.support.numbered import Numbered, ids_of

pytestmark = pytest.mark.slow

LENGTHS = (20,) * 12


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Twelve buckets."""
    monkeypatch.setattr(sys.modules["daskdl.data.export"], "BUCKET_BYTES", 20 * 17)


class Noted(Numbered):
    """Each loading of a part is noted in a folder."""

    def __init__(self, folder):
        super().__init__(LENGTHS)
        self.folder = Path(folder)

    @override
    def load(self, part):
        (self.folder / f"{part}-{uuid.uuid4().hex}").touch()
        return super().load(part)

    def loads(self):
        """Which parts have been loaded since the last call, in order."""
        files = list(self.folder.iterdir())
        for file in files:
            file.unlink()
        return sorted(int(file.name.partition("-")[0]) for file in files)


def first_time(folder):
    """Whether nobody has asked before."""
    try:
        (Path(folder) / "asked").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DiesOnce(Numbered):
    """The worker that is the first to load the last part is killed."""

    def __init__(self, folder):
        super().__init__(LENGTHS)
        self.folder = folder

    @override
    def load(self, part):
        if part == self.parts - 1 and first_time(self.folder):
            die()
        return super().load(part)


class Interrupts(Noted):
    """The first loading of the last part interrupts the client, and then waits.

    Args:
        folder: For notes.
        gate: A named pipe; when "go on" is written into it, loading goes on.
    """

    def __init__(self, folder, gate):
        super().__init__(folder)
        self.client = os.getpid()
        self.gate = gate

    @override
    def load(self, part):
        rows = super().load(part)
        if part == self.parts - 1 and first_time(self.gate.parent):
            os.kill(self.client, signal.SIGINT)
            if self.gate.read_text() != "go on":
                raise OSError("this loading is to fail")
        return rows


@pytest.fixture
def gate(tmp_path):
    (tmp_path / "gate").mkdir()
    path = tmp_path / "gate" / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def interrupting(tmp_path, gate):
    folder = tmp_path / "notes"
    folder.mkdir()
    return Interrupts(folder, gate)


@pytest.fixture
def here(tmp_path):
    """The same export in one process."""
    return export(Numbered(LENGTHS), url=tmp_path / "here", batch_size=4, client=False)


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "export")


def complete(url, made):
    """Whether each row is in one of the files of an export, and nothing else there."""
    names = [file.name for file in made.files]
    rows = sorted(ids_of(BatchFiles(url)))
    return (
        rows == list(range(sum(LENGTHS)))
        and made.lengths == [4] * 60
        and Store(url).names() == [*names, "manifest.json"]
    )


def test_files_are_the_same_whatever_the_number_of_workers(client, here, url):
    made = export(Numbered(LENGTHS), url=url, batch_size=4, client=client)

    assert made.files == here.files
    assert complete(url, made)


@pytest.mark.slow
def test_a_worker_killed_while_it_reads_loses_and_doubles_nothing(
    three, here, url, tmp_path
):
    made = export(DiesOnce(tmp_path), url=url, batch_size=4, client=three)

    assert (tmp_path / "asked").exists()
    assert made.files == here.files
    assert complete(url, made)


@pytest.mark.slow
def test_a_worker_killed_while_it_writes_loses_and_doubles_nothing(
    three, here, url, tmp_path
):
    def dies_once(batch):
        if 107 in batch[0]["id"].tolist() and first_time(tmp_path):
            die()
        return batch

    made = export(
        Numbered(LENGTHS), url=url, batch_size=4, transform=dies_once, client=three
    )

    assert (tmp_path / "asked").exists()
    assert made.files == here.files
    assert complete(url, made)


def test_an_interrupted_export_goes_on_where_it_stopped(
    three, here, url, ctrl_c, interrupting, gate
):
    with pytest.raises(KeyboardInterrupt):
        export(interrupting, url=url, batch_size=4, client=three)
    gate.write_text("fail")
    assert still_left_behind(three) == {}
    done = Progress(Store(url)).done("part")
    interrupting.loads()
    with pytest.raises(DataError, match="has not been finished; run it again"):
        BatchFiles(url)

    made = export(interrupting, url=url, batch_size=4, client=three)

    assert 6 <= len(done) <= 11
    assert interrupting.loads() == [part for part in range(12) if part not in done]
    assert made.files == here.files
    assert complete(url, made)


@pytest.mark.slow
def test_temporary_files_do_not_come_back_after_an_interruption(
    three, ctrl_c, interrupting, gate, tmp_path, monkeypatch
):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    own = temporary_batches(interrupting, ExportOptions(4), three)

    with pytest.raises(KeyboardInterrupt):
        own.__enter__()

    gate.write_text("go on")
    assert still_left_behind(three) == {}
    assert list(folder.iterdir()) == []


def test_temporary_files_are_seen_by_all_workers_of_this_machine(client, tmp_path):
    with temporary_batches(Numbered(LENGTHS), ExportOptions(4), client) as source:
        lengths = client.submit(lambda: [len(source.load(p)[1]) for p in range(3)])

        assert lengths.result() == [4, 4, 4]
        lengths.release()
