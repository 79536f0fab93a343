"""Data that are exported for one fit: read once, and not there any more afterwards."""

import pathlib
import tempfile

import dask.config
import numpy as np
import pytest

from daskdl import OptionError, ReplicaError
from daskdl.data.storage import Store
from tests.support.problems import trainer
from tests.support.promises import FailAt, Interrupt
from tests.support.watched import TrainedRows, Watched, watched_blocks

pytestmark = pytest.mark.slow

EPOCHS = 3
ALL = dict.fromkeys(range(480), 1)
MEMORY = "memory://daskdl-test-exported-fits"


@pytest.fixture(params=["configured", "temporary"])
def store(request, tmp_path, monkeypatch):
    """Where temporary batch files are made."""
    store = Store(str(tmp_path / "exports"))
    pathlib.Path(store.url).mkdir()
    if request.param == "configured":
        with dask.config.set({"daskdl.export.url": store.url}):
            yield store
        return
    monkeypatch.setattr(tempfile, "tempdir", store.url)
    yield store


def below(store):
    """All files and folders that are left where batch files were made."""
    return list(pathlib.Path(store.url).rglob("*"))


class Looking(TrainedRows):
    """Also looks, after each epoch, how many batch files there are."""

    def __init__(self, folder, store):
        super().__init__(folder)
        self._store = store
        self.files = []

    def on_epoch_end(self, row):
        self.files.append(len(self._store.names("**/*.safetensors")))


class TestExportedFits:
    def test_blocks_are_made_once_for_all_epochs(self, client, store, tmp_path):
        watched, looking = Watched(tmp_path), Looking(tmp_path, store)
        own = trainer(client, loss=looking, callbacks=[looking])

        own.fit(
            *watched_blocks(watched), epochs=EPOCHS, batch_size=8, approach="export"
        )

        assert looking.by_epoch() == [ALL] * EPOCHS
        assert looking.replicas() == {0, 1}
        assert watched.times() == dict.fromkeys(range(12), 1)
        assert len(set(looking.files)) == 1 <= looking.files[0]
        assert below(store) == []

    def test_nothing_is_left_when_the_model_fails(self, client, store, tmp_path):
        x, y = watched_blocks(Watched(tmp_path))
        own = trainer(client, callbacks=[FailAt(RuntimeError)])

        with pytest.raises(ReplicaError, match="RuntimeError"):
            own.fit(x, y % 4, batch_size=8, approach="export")

        assert below(store) == []

    def test_nothing_is_left_when_a_block_fails(self, client, store, tmp_path):
        def broken(number):
            if number == 7:
                raise LookupError("no such block")

        x, y = watched_blocks(Watched(tmp_path, broken))

        with pytest.raises(LookupError, match="no such block"):
            trainer(client).fit(x, y % 4, batch_size=8, approach="export")

        assert below(store) == []

    @pytest.mark.usefixtures("ctrl_c")
    def test_nothing_is_left_after_ctrl_c(self, client, store, tmp_path):
        x, y = watched_blocks(Watched(tmp_path))
        own = trainer(client, callbacks=[Interrupt()])

        with pytest.raises(KeyboardInterrupt):
            own.fit(x, y % 4, epochs=10_000, batch_size=8, approach="export")

        assert below(store) == []


@pytest.fixture
def in_memory():
    """Batch files are made in the memory of this process."""
    with dask.config.set({"daskdl.export.url": MEMORY}):
        yield Store(MEMORY)


class TestInTheMemoryOfThreads:
    def test_nothing_is_left_at_the_end(self, threads, in_memory, tmp_path):
        watched, looking = Watched(tmp_path), Looking(tmp_path, in_memory)
        own = trainer(threads, loss=looking, callbacks=[looking])

        own.fit(
            *watched_blocks(watched), epochs=EPOCHS, batch_size=8, approach="export"
        )

        assert looking.by_epoch() == [ALL] * EPOCHS
        assert watched.times() == dict.fromkeys(range(12), 1)
        assert min(looking.files) >= 1
        assert in_memory.names() == []

    def test_nothing_is_left_when_the_model_fails(self, threads, in_memory, tmp_path):
        x, y = watched_blocks(Watched(tmp_path))
        own = trainer(threads, callbacks=[FailAt(RuntimeError)])

        with pytest.raises(ReplicaError, match="RuntimeError"):
            own.fit(x, y % 4, batch_size=8, approach="export")

        assert in_memory.names() == []


def test_data_in_memory_are_exported_too(client, store, tmp_path):
    looking = Looking(tmp_path, store)
    own = trainer(client, loss=looking, callbacks=[looking])
    x = np.random.default_rng(0).normal(size=(480, 20)).astype("float32")

    own.fit(x, np.arange(480), epochs=EPOCHS, batch_size=8, approach="export")

    assert looking.by_epoch() == [ALL] * EPOCHS
    assert min(looking.files) >= 1
    assert below(store) == []


@pytest.fixture
def blind(client):
    """A worker that sees no files, as one on another machine does not see ours."""

    def blindfold():
        pathlib.Path.daskdl_test_exists = pathlib.Path.exists
        pathlib.Path.exists = lambda self: False

    def see():
        pathlib.Path.exists = pathlib.Path.daskdl_test_exists
        del pathlib.Path.daskdl_test_exists

    worker = sorted(client.nthreads())[1]
    client.run(blindfold, workers=[worker])
    yield worker
    client.run(see, workers=[worker])


def test_a_worker_that_does_not_see_the_folder_is_named(
    client, blind, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x, y = watched_blocks(Watched(tmp_path))

    with pytest.raises(OptionError, match=rf"is not seen by {blind}; set daskdl\.exp"):
        trainer(client).fit(x, y % 4, approach="export")

    # Torch makes a folder of its own there, if this is its first optimizer.
    assert [p for p in tmp_path.iterdir() if "torch" not in p.name] == []
