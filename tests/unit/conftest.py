"""Fixtures of several unit tests."""

import itertools

import pytest

from daskdl.checkpoints.series import Series
from daskdl.data.stores.store import store_of

_numbers = itertools.count()


@pytest.fixture
def in_memory():
    """A series of checkpoints without any; its folder is not there yet."""
    own = store_of(f"memory://checkpoints-{next(_numbers)}")
    yield Series(own)
    own.delete_all()


@pytest.fixture(params=["memory", "local"])
def series(request, tmp_path):
    """The same, also on disk."""
    if request.param == "local":
        return Series(store_of(tmp_path / "checkpoints"))
    return request.getfixturevalue("in_memory")


@pytest.fixture
def store(series):
    """Its folder."""
    return series.store
