"""Files on an S3 server, read by worker processes."""

import io

import numpy as np
import pytest

from daskdl.data.distribute import map_parts
from daskdl.data.files import files
from daskdl.data.formats import Npz
from daskdl.data.storage import Store
from daskdl.errors import DataError
from tests.support import s3

pytestmark = pytest.mark.slow


@pytest.fixture
def store(bucket, s3_endpoint):
    return Store(f"{bucket}/x", s3.options(s3_endpoint))


def write_arrays(store, count):
    """The file i has i + 1 rows with the label i."""
    for i in range(count):
        file = io.BytesIO()
        np.savez(file, x=np.full((i + 1, 2), i, np.float32), y=np.full(i + 1, i))
        store.write(f"{i}.npz", file.getvalue())


def total(source, part):
    x, y = source.load(part)
    return len(x), int(y.sum())


def test_workers_read_files_from_the_server(client, store):
    write_arrays(store, 4)
    source = files(store.url, Npz(), storage_options=store.options)

    found = dict(map_parts(source, total, client))

    assert found == {i: (i + 1, i * (i + 1)) for i in range(4)}


def test_workers_look_at_files_and_read_groups_of_them(client, store):
    for i in range(10):
        store.write(f"{i}.bin", bytes([i, 7]))

    def load(file):
        content = file.read()
        return np.frombuffer(content, "u1"), content[0]

    options = {"files_per_part": 4, "storage_options": store.options}
    source = files(store.url, load, one_example=True, **options)

    rows = dict(map_parts(source, lambda source, part: source.look(part).rows, client))
    found = dict(map_parts(source, total, client))

    assert rows == {0: 4, 1: 4, 2: 2}
    assert found == {0: (4, 6), 1: (4, 22), 2: (2, 17)}


def test_connections_dropped_before_a_worker_are_tried_again(client, store):
    write_arrays(store, 3)

    with s3.door(store.options["endpoint_url"], 2) as door:
        source = files(
            [f"{store.url}/{i}.npz" for i in range(3)],
            storage_options=s3.options(door.endpoint),
        )
        found = dict(map_parts(source, total, client))

    assert found == {0: (1, 0), 1: (2, 2), 2: (3, 6)}
    assert door.visits > 2


def test_a_file_that_went_is_named_by_the_worker(client, store):
    write_arrays(store, 2)
    source = files(store.url, storage_options=store.options)
    store.delete(["1.npz"])

    with pytest.raises(
        DataError, match=rf"cannot read {store.url}/1\.npz: there is no"
    ):
        dict(map_parts(source, total, client))
