"""Packing on a cluster: every file once, the same bytes as in one process."""

import os
import signal
import sys
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from distributed import get_worker

from daskdl.data.distribute import map_parts
from daskdl.data.files import KIND, files, pack_files
from daskdl.data.images import image_folder
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError
from tests.support.pictures import folder
from tests.support.s3 import options

module = sys.modules["daskdl.data.files"]  # the package has the function

pytestmark = pytest.mark.slow

FILES = {f"{'abc'[i % 3]}/{i:02}.txt": f"file {i}".encode() for i in range(60)}
PER_SHARD = 5
SHARDS = 12

pack_part = module._pack


@pytest.fixture
def root(tmp_path):
    store = Store(str(tmp_path / "root"))
    for name, content in FILES.items():
        store.write(name, content)
    return tmp_path / "root"


def pack(paths, url, client, per_shard=PER_SHARD, **options):
    return pack_files(
        paths, url=url, files_per_shard=per_shard, client=client, **options
    )


def contents(url):
    """Every file of a local folder."""
    return {path.name: path.read_bytes() for path in url.iterdir()}


def files_in(url):
    """All files in the shards; one that is there twice would be seen."""
    found = []
    for shard in module.shards_in(store_of(url)):
        contents = shard.each(lambda _, file: file.read())
        found += zip(shard.names, contents, strict=True)
    assert len(found) == len(dict(found))
    return dict(found)


def dying(notes, moment, target, source, part):
    """Pack a group; the worker that is the first to come to part 7 is killed."""
    (Path(notes) / f"{part}-{uuid.uuid4().hex}").touch()
    if moment == "before":
        _die_once(notes, part)
    shard = pack_part(target, source, part)
    if moment == "after":
        _die_once(notes, part)
    return shard


def _die_once(notes, part):
    try:
        if part == 7:
            (Path(notes) / "died").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass


def loaded_on_workers(source, client):
    """Each part's number and rows, in order."""
    return sorted(map_parts(source, lambda source, part: source.load(part), client))


def named(notes, target, source, part):
    """Pack a group, and note on which worker."""
    (Path(notes) / f"{part}-{get_worker().name}").touch()
    return pack_part(target, source, part)


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes"
    path.mkdir()
    return path


def test_it_is_packed_on_all_workers_as_in_one_process(
    client, root, tmp_path, notes, monkeypatch
):
    pack(root, tmp_path / "alone", False)
    monkeypatch.setattr(module, "_pack", partial(named, notes))

    pack(root, tmp_path / "packed", client)

    assert contents(tmp_path / "packed") == contents(tmp_path / "alone")
    parts, workers = zip(
        *(path.name.split("-") for path in notes.iterdir()), strict=True
    )
    assert sorted(map(int, parts)) == list(range(SHARDS))
    assert len(set(workers)) == 2


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_a_worker_is_killed(
    three, root, tmp_path, notes, monkeypatch, moment
):
    monkeypatch.setattr(module, "_pack", partial(dying, notes, moment))

    urls = pack(root, tmp_path / "packed", three)

    assert (notes / "died").exists()
    assert files_in(tmp_path / "packed") == FILES
    assert sorted(contents(tmp_path / "packed")) == sorted(
        [*(Path(url).name for url in urls), KIND.name]
    )


def test_a_file_that_cannot_be_read_is_named(client, tmp_path):
    url = "memory://not-on-the-workers"  # each process has a memory of its own
    for name in FILES:
        Store(url).write(name, b"?")
    listed = [f"{url}/{name}" for name in FILES]

    with pytest.raises(DataError, match=rf"cannot read {url}/./\d\d\.txt: there is no"):
        pack(listed, tmp_path / "packed", client)

    assert not (tmp_path / "packed" / KIND.name).exists()


def test_images_are_packed_to_a_server_and_read_there(
    client, tmp_path, bucket, s3_endpoint
):
    names = [f"{label}/{i}.png" for label in ("cat", "ant") for i in range(10)]
    folder(tmp_path / "images", names)

    own = {"storage_options": options(s3_endpoint)}

    pack(tmp_path / "images", f"{bucket}/packed", client, 6, **own)

    source = image_folder(f"{bucket}/packed", **own)
    local = image_folder(tmp_path / "images", files_per_part=20)
    x, y = local.load(0)
    expected = dict(zip(local.paths, zip(x, y, strict=True), strict=True))
    loaded = [rows for _, rows in loaded_on_workers(source, client)]
    rows = [pair for x, y in loaded for pair in zip(x, y, strict=True)]
    for name, (image, label) in zip(source.paths, rows, strict=True):
        np.testing.assert_array_equal(image, expected[name][0])
        assert label == expected[name][1]


def length(file):
    return np.array([[len(file.read())]]), np.array([0])


def test_shards_are_loaded_on_the_workers(client, root, tmp_path):
    pack(root, tmp_path / "packed", client)
    source = files(tmp_path / "packed", length)

    loaded = loaded_on_workers(source, client)

    sizes = np.concatenate([x for _, (x, _) in loaded])[:, 0]
    names = [name for shard in source.groups for name in shard.names]
    assert sizes.tolist() == [len(FILES[name]) for name in names]
