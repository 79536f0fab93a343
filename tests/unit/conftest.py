"""Fixtures of several unit tests."""

import itertools

import pytest

from daskdl.checkpoints.series import Series
from daskdl.data.stores.store import store_of

_numbers = itertools.count()


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    """A folder for checkpoints, which is not there yet."""
    if request.param == "local":
        yield store_of(tmp_path / "checkpoints")
        return
    own = store_of(f"memory://checkpoints-{next(_numbers)}")
    yield own
    own.delete_all()


@pytest.fixture
def series(store):
    """The checkpoints in there."""
    return Series(store)
