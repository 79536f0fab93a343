"""Training from files on a server, also one that drops connections."""

import io
from functools import partial

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

EPOCHS = 3
X, _ = rows()
ALL = dict.fromkeys(range(480), 1)


@pytest.fixture
def on_s3(bucket, s3_endpoint):
    """Rows and their numbers, 40 in each file."""
    store = Store(f"{bucket}/x", s3.options(s3_endpoint))
    for i in range(12):
        rows, content = slice(40 * i, 40 * (i + 1)), io.BytesIO()
        np.savez(content, x=X[rows], y=np.arange(480)[rows])
        store.write(f"{i}.npz", content.getvalue())
    return store


@pytest.fixture
def trained(tmp_path):
    return TrainedRows(tmp_path)


def fit(client, trained, data, *more, **options):
    """Train on numbered rows."""
    fitted = trainer(client, loss=trained, callbacks=[trained, *more])
    return fitted.fit(data, epochs=EPOCHS, batch_size=8, **options)


def test_from_a_server(client, trained, on_s3):
    fit(client, trained, files(on_s3.url, storage_options=on_s3.options))

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert trained.replicas() == {0, 1}


class AfterOneEpoch(Callback):
    """Does something on the client once training goes on."""

    def __init__(self, action):
        self.action = action

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            self.action()


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
    visits = []

    def drop():
        visits.append(door.visits)
        door.drop(3)

    fit(client, trained, source, AfterOneEpoch(drop))

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert door.visits > visits[0] + 3


def test_a_server_that_stays_away_is_named_with_the_file(client, trained, on_s3, door):
    source = files(on_s3.url, storage_options=s3.options(door.endpoint))

    with pytest.raises(DataError) as caught:
        fit(client, trained, source, AfterOneEpoch(partial(door.drop, 10**6)))

    message = str(caught.value)
    assert message.startswith("replica ")
    assert f"cannot read {on_s3.url}/" in message
    assert trained.by_epoch()[0] == ALL


def test_a_file_that_stays_away_may_be_left_out(client, trained, on_s3):
    source = files(on_s3.url, storage_options=on_s3.options)
    lost = AfterOneEpoch(partial(on_s3.delete, ["5.npz"]))

    history = fit(client, trained, source, lost, on_bad_batch="skip")

    assert trained.by_epoch()[1] == {i: 1 for i in range(480) if not 200 <= i < 240}
    assert history.column("skipped_examples") == [0, 40, 40]
