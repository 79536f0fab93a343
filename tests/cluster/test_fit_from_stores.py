"""Training from files on a server, on this machine, and in memory."""

import io

import numpy as np
import pytest
from s3fs import S3FileSystem

from daskdl import Callback, DataError
from daskdl.data import files
from daskdl.data.storage import Store
from tests.support import s3
from tests.support.problems import rows, trainer
from tests.support.watched import TrainedRows

pytestmark = pytest.mark.slow

FILES, EPOCHS = 12, 3
X, _ = rows()
ALL = dict.fromkeys(range(480), 1)


def write_files(store):
    """Rows and their numbers, 40 in each file."""
    for i in range(FILES):
        own, content = slice(40 * i, 40 * (i + 1)), io.BytesIO()
        np.savez(content, x=X[own], y=np.arange(480)[own])
        store.write(f"{i}.npz", content.getvalue())
    return store


@pytest.fixture
def on_s3(bucket, s3_endpoint):
    return write_files(Store(f"{bucket}/x", s3.options(s3_endpoint)))


@pytest.fixture
def trained(tmp_path):
    return TrainedRows(tmp_path)


def fit(client, trained, data, *more, **options):
    """Train on numbered rows."""
    own = trainer(client, loss=trained, callbacks=[trained, *more])
    return own.fit(data, epochs=EPOCHS, batch_size=8, **options)


def test_from_a_server(client, trained, on_s3):
    fit(client, trained, on_s3.url, storage_options=on_s3.options)

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert trained.replicas() == {0, 1}


def test_from_a_folder(client, trained, tmp_path):
    store = write_files(Store(str(tmp_path / "files")))

    fit(client, trained, store.url)

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert trained.replicas() == {0, 1}


def test_from_the_memory_of_threads(threads, trained):
    store = write_files(Store("memory://daskdl-test-fit-from-stores"))
    try:
        fit(threads, trained, store.url)
    finally:
        store.delete_all()

    assert trained.by_epoch() == [ALL] * EPOCHS


class Drop(Callback):
    """Once training goes on, the server drops all connections, and some that come.

    Args:
        door: Before the server.
        refused: How many.

    Attributes:
        visits: Connections before that.
    """

    def __init__(self, door, refused):
        self._door = door
        self._refused = refused

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            self.visits = self._door.visits
            self._door.drop(self._refused)


@pytest.fixture
def door(client, on_s3):
    """Before a server whose connections s3fs by itself does not try again."""

    def tries(count):
        S3FileSystem.retries = count

    client.run(tries, 1)
    with s3.door(on_s3.options["endpoint_url"], 0) as door:
        yield door
    client.run(tries, S3FileSystem.retries)


def test_dropped_connections_are_tried_again(client, trained, on_s3, door):
    source = files(on_s3.url, storage_options=s3.options(door.endpoint))
    drop = Drop(door, 3)

    fit(client, trained, source, drop)

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert door.visits > drop.visits + 3


def test_a_server_that_stays_away_is_named_with_the_file(client, trained, on_s3, door):
    source = files(on_s3.url, storage_options=s3.options(door.endpoint))

    with pytest.raises(DataError) as caught:
        fit(client, trained, source, Drop(door, 10**6))

    message = str(caught.value)
    assert message.startswith("replica ")
    assert f"cannot read {on_s3.url}/" in message
    assert trained.by_epoch()[0] == ALL


def test_a_file_that_stays_away_may_be_left_out(client, trained, on_s3):
    source = files(on_s3.url, storage_options=on_s3.options)
    lost = Delete(on_s3, "5.npz")

    history = fit(client, trained, source, lost, on_bad_batch="skip")

    assert trained.by_epoch()[1] == {i: 1 for i in range(480) if not 200 <= i < 240}
    assert history.column("skipped_examples") == [0, 40, 40]


class Delete(Callback):
    """Deletes a file after the first epoch."""

    def __init__(self, store, name):
        self._store = store
        self._name = name

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            self._store.delete([self._name])
