"""Packing on a cluster: the same bytes as in one process, on a server too."""

import numpy as np
import pytest

from daskdl.data import files, image_folder, pack_files
from daskdl.data.storage import Store
from tests.support.pictures import folder
from tests.support.s3 import options

pytestmark = pytest.mark.slow


def contents(url):
    """Every file of a local folder."""
    return {path.name: path.read_bytes() for path in url.iterdir()}


def test_shards_are_the_same_as_from_one_process_and_loaded_on_the_workers(
    client, tmp_path
):
    store = Store(str(tmp_path / "root"))
    for i in range(60):
        store.write(f"{'abc'[i % 3]}/{i:02}.txt", b"x" * i)

    for name, own in (("alone", False), ("packed", client)):
        pack_files(store.url, url=tmp_path / name, files_per_shard=5, client=own)
    source = files(tmp_path / "packed", lambda file: np.array([[len(file.read())]]))
    parts = client.map(source.load, range(source.parts))

    assert contents(tmp_path / "packed") == contents(tmp_path / "alone")
    sizes = np.concatenate([x for x, _ in client.gather(parts)])[:, 0]
    names = [name for shard in source.groups for name in shard.names]
    assert sizes.tolist() == [int(name[2:4]) for name in names]
    assert sorted(sizes) == list(range(60))


def test_images_are_packed_to_a_server_and_read_there(
    client, tmp_path, bucket, s3_endpoint
):
    names = [f"{label}/{i}.png" for label in ("cat", "ant") for i in range(10)]
    folder(tmp_path / "images", names)
    own = {"storage_options": options(s3_endpoint)}

    pack_files(
        tmp_path / "images",
        url=f"{bucket}/packed",
        files_per_shard=6,
        client=client,
        **own,
    )

    source = image_folder(f"{bucket}/packed", **own)
    local = image_folder(tmp_path / "images", files_per_part=20)
    expected = dict(zip(local.paths, zip(*local.load(0), strict=True), strict=True))
    loaded = client.gather(client.map(source.load, range(source.parts)))
    rows = [pair for x, y in loaded for pair in zip(x, y, strict=True)]
    for name, (image, label) in zip(source.paths, rows, strict=True):
        np.testing.assert_array_equal(image, expected[name][0])
        assert label == expected[name][1]
