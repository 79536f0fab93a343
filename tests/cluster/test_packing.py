"""Packing on a cluster: the same bytes as anywhere, whoever dies meanwhile."""

import os
import signal
import uuid
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from daskdl.data import files, image_folder, pack, packing
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError
from tests.support.clusters import still_left_behind
from tests.support.numbered import Numbered, ids_of
from tests.support.pictures import folder
from tests.support.s3 import options

pytestmark = pytest.mark.slow

LENGTHS = (20,) * 12


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Twelve buckets."""
    monkeypatch.setattr(packing, "BUCKET_BYTES", 20 * 17)


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
def alone(tmp_path):
    """The same rows, packed in one process."""
    pack(Numbered(LENGTHS), url=tmp_path / "alone", per_file=4, client=False)
    return contents(tmp_path / "alone")


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "packed")


def contents(url):
    """Every file of a folder."""
    store = store_of(url)
    return {name: store.read(name) for name in store.names()}


def test_a_worker_killed_while_it_writes_loses_and_doubles_nothing(
    three, alone, url, tmp_path
):
    def dies_once(rows):
        if 107 in rows[0]["id"].tolist() and first_time(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    pack(Numbered(LENGTHS), url=url, per_file=4, transform=dies_once, client=three)

    assert (tmp_path / "asked").exists()
    # Manifests differ in the transform.
    rows = {name: content for name, content in alone.items() if name[-1] == "s"}
    assert contents(url).items() >= rows.items()
    assert contents(url).keys() == alone.keys()
    assert sorted(ids_of(files(url))) == list(range(sum(LENGTHS)))


def test_interrupted_packing_continues_where_it_stopped(
    three, alone, url, ctrl_c, tmp_path
):
    for name in ("gate", "notes"):
        (tmp_path / name).mkdir()
    gate = tmp_path / "gate" / "pipe"
    os.mkfifo(gate)
    interrupting = Interrupts(tmp_path / "notes", gate)
    with pytest.raises(KeyboardInterrupt):
        pack(interrupting, url=url, per_file=4, client=three)
    gate.write_text("fail")
    assert still_left_behind(three) == {}
    records = Store(url).names(".unfinished/part-*.json")
    done = {int(name[-11:-5]) for name in records}
    interrupting.loads()
    with pytest.raises(DataError, match="has not been finished; run it again"):
        files(url)

    pack(interrupting, url=url, per_file=4, client=three)

    assert 6 <= len(done) <= 11
    assert interrupting.loads() == [part for part in range(12) if part not in done]
    packed = contents(url)
    assert packed.keys() == alone.keys()
    assert all(packed[name] == alone[name] for name in alone if name[-1] == "s")


def test_original_files_are_packed_as_in_one_process_and_loaded_on_the_workers(
    client, tmp_path
):
    store = Store(str(tmp_path / "root"))
    for i in range(60):
        store.write(f"{'abc'[i % 3]}/{i:02}.txt", b"x" * i)

    for name, where in (("alone", False), ("packed", client)):
        pack(store.url, url=tmp_path / name, per_file=5, client=where)
    source = files(tmp_path / "packed", lambda file: np.array([[len(file.read())]]))
    parts = client.map(source.load, range(source.parts))

    assert contents(tmp_path / "packed") == contents(tmp_path / "alone")
    sizes = np.concatenate([x for x, _ in client.gather(parts)])[:, 0]
    names = [name for group in source.groups for name in group.names]
    assert sizes.tolist() == [int(name[2:4]) for name in names]
    assert sorted(sizes) == list(range(60))


def test_images_are_packed_to_a_server_and_read_there(
    client, tmp_path, bucket, s3_endpoint
):
    names = [f"{label}/{i}.png" for label in ("cat", "ant") for i in range(10)]
    folder(tmp_path / "images", names)
    access = {"storage_options": options(s3_endpoint)}
    url = f"{bucket}/packed"

    pack(tmp_path / "images", url=url, per_file=6, client=client, **access)

    source = image_folder(url, **access)
    local = image_folder(tmp_path / "images", files_per_part=20)
    expected = dict(zip(local.paths, zip(*local.load(0), strict=True), strict=True))
    loaded = client.gather(client.map(source.load, range(source.parts)))
    rows = [pair for x, y in loaded for pair in zip(x, y, strict=True)]
    for name, (image, label) in zip(source.paths, rows, strict=True):
        np.testing.assert_array_equal(image, expected[name][0])
        assert label == expected[name][1]
