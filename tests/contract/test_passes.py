"""One pass over all parts, in this process; tests/cluster has those on workers."""

import numpy as np
import pytest

from daskdl.data.distribute import map_parts
from daskdl.data.tables import InMemory
from tests.support.sources import Parts

X = np.arange(12.0).reshape(6, 2)


def total(source, part):
    return float(source.load(part)[0].sum())


def parts():
    return Parts(*((X[i : i + 2], None) for i in (0, 2, 4)))


@pytest.mark.parametrize("client", [False, None], ids=["here", "no client"])
def test_each_part_is_passed_with_the_source_once_and_in_order(client):
    assert list(map_parts(parts(), total, client)) == [(0, 6), (1, 22), (2, 38)]


@pytest.mark.parametrize("which", [[2, 0], iter([2, 0])], ids=["list", "iterator"])
def test_only_those_that_are_asked_for_are_looked_at(which):
    assert list(map_parts(parts(), total, False, parts=which)) == [(2, 38), (0, 6)]


def test_no_part_is_begun_before_its_result_is_asked_for():
    begun = []

    def note(source, part):
        begun.append(part)
        return part

    results = map_parts(parts(), note, False)

    assert begun == []
    assert next(results) == (0, 0)
    assert begun == [0]


def test_what_the_function_raises_comes_out_as_it_is():
    def fail(source, part):
        if part == 1:
            raise KeyError("mine")

    results = map_parts(parts(), fail, False)

    assert next(results) == (0, None)
    with pytest.raises(KeyError, match="mine"):
        next(results)


def test_what_is_in_this_process_stays_here_whatever_the_client():
    nobody = object()  # anything that is asked of it would be an error
    source = InMemory(X, None, batch_size=2)

    assert list(map_parts(source, total, nobody)) == [(0, 6), (1, 22), (2, 38)]


def test_it_is_sent_if_that_is_asked_for():
    with pytest.raises(AttributeError):  # of the object that is no client
        next(map_parts(InMemory(X, None, batch_size=2), total, object(), send=True))
