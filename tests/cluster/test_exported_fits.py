"""Data that are exported for one fit: read once, and not there any more afterwards."""

import pathlib
import tempfile

import dask.config
import pytest

from daskdl import ReplicaError
from daskdl.data.storage import Store
from tests.support.problems import trainer
from tests.support.promises import FailAt, Interrupt
from tests.support.watched import TrainedRows, Watched, watched_blocks

pytestmark = pytest.mark.slow

EPOCHS = 3
ALL = dict.fromkeys(range(480), 1)


@pytest.fixture(params=["configured", "temporary"])
def store(request, tmp_path, monkeypatch):
    """Where temporary packed files are made."""
    store = Store(str(tmp_path / "exports"))
    pathlib.Path(store.url).mkdir()
    if request.param == "configured":
        with dask.config.set({"daskdl.export.url": store.url}):
            yield store
        return
    monkeypatch.setattr(tempfile, "tempdir", store.url)
    yield store


def below(store):
    """All files and folders that are left where packed files were made."""
    return list(pathlib.Path(store.url).rglob("*"))


class Looking(TrainedRows):
    """Also looks, after each epoch, how many packed files there are."""

    def __init__(self, folder, store):
        super().__init__(folder)
        self.store, self.files = store, []

    def on_epoch_end(self, row):
        self.files.append(len(self.store.names("**/*.safetensors")))


def fit(client, store, tmp_path):
    """Train on numbered blocks, each of which is to be made once."""
    watched, looking = Watched(tmp_path), Looking(tmp_path, store)
    fitted = trainer(client, loss=looking, callbacks=[looking])

    fitted.fit(*watched_blocks(watched), epochs=EPOCHS, batch_size=8, approach="export")

    assert looking.by_epoch() == [ALL] * EPOCHS
    assert watched.times() == dict.fromkeys(range(12), 1)
    assert len(set(looking.files)) == 1 <= looking.files[0]
    return looking


def test_blocks_are_made_once_for_all_epochs(client, store, tmp_path):
    looking = fit(client, store, tmp_path)

    assert looking.replicas() == {0, 1}
    assert below(store) == []


def test_they_may_be_in_the_memory_of_threads(threads, tmp_path):
    store = Store("memory://daskdl-test-exported-fits")
    with dask.config.set({"daskdl.export.url": store.url}):
        fit(threads, store, tmp_path)

    assert store.names() == []


def broken(number):
    if number == 7:
        raise LookupError("no such block")


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("block", "callback", "error"),
    [
        (None, FailAt(RuntimeError), ReplicaError),
        (broken, None, LookupError),
        (None, Interrupt(), KeyboardInterrupt),
    ],
    ids=["model fails", "block fails", "ctrl-c"],
)
def test_nothing_is_left_after(client, store, tmp_path, block, callback, error):
    x, y = watched_blocks(Watched(tmp_path, block))
    failing = trainer(client, callbacks=[callback] if callback else [])

    with pytest.raises(error):
        failing.fit(x, y % 4, epochs=10_000, batch_size=8, approach="export")

    assert below(store) == []
