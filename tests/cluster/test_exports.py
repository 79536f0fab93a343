"""Exports on a cluster: the same files as anywhere, whoever dies meanwhile."""

import os
import signal
import sys
import uuid
from pathlib import Path

import pytest
from typing_extensions import override

from daskdl.data.batch_files import BatchFiles
from daskdl.data.export import export
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


def first_time(folder):
    """Whether nobody has asked before."""
    try:
        (Path(folder) / "asked").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Interrupts(Numbered):
    """The first loading of the last part interrupts the client, and then waits.

    Args:
        folder: Where each loading of a part is noted.
        gate: A named pipe; what is written into it ends the wait, in failure.
    """

    def __init__(self, folder, gate):
        super().__init__(LENGTHS)
        self.folder, self.gate, self.client = folder, gate, os.getpid()

    @override
    def load(self, part):
        (self.folder / f"{part}-{uuid.uuid4().hex}").touch()
        rows = super().load(part)
        if part == self.parts - 1 and first_time(self.gate.parent):
            os.kill(self.client, signal.SIGINT)
            self.gate.read_text()
            raise OSError("this loading is to fail")
        return rows

    def loads(self):
        """Which parts have been loaded since the last call, in order."""
        files = list(self.folder.iterdir())
        for file in files:
            file.unlink()
        return sorted(int(file.name.partition("-")[0]) for file in files)


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


def test_a_worker_killed_while_it_writes_loses_and_doubles_nothing(
    three, here, url, tmp_path
):
    def dies_once(batch):
        if 107 in batch[0]["id"].tolist() and first_time(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    made = export(
        Numbered(LENGTHS), url=url, batch_size=4, transform=dies_once, client=three
    )

    assert (tmp_path / "asked").exists()
    assert made.files == here.files
    assert complete(url, made)


def test_an_interrupted_export_goes_on_where_it_stopped(
    three, here, url, ctrl_c, tmp_path
):
    for name in ("gate", "notes"):
        (tmp_path / name).mkdir()
    gate = tmp_path / "gate" / "pipe"
    os.mkfifo(gate)
    interrupting = Interrupts(tmp_path / "notes", gate)
    with pytest.raises(KeyboardInterrupt):
        export(interrupting, url=url, batch_size=4, client=three)
    gate.write_text("fail")
    assert still_left_behind(three) == {}
    records = Store(url).names(".unfinished/part-*.json")
    done = {int(name[-11:-5]) for name in records}
    interrupting.loads()
    with pytest.raises(DataError, match="has not been finished; run it again"):
        BatchFiles(url)

    made = export(interrupting, url=url, batch_size=4, client=three)

    assert 6 <= len(done) <= 11
    assert interrupting.loads() == [part for part in range(12) if part not in done]
    assert made.files == here.files
    assert complete(url, made)
