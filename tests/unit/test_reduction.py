from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from daskdl.channel.protocol import Routes
from daskdl.training.tree_reduce import Reduction, add
from tests.support.boards import Board, Channel


def results_of(count, *, fan_out, root=0, lost=(), adds=None):
    """What each replica that was not lost ends with."""
    board = Board(lost)
    routes = Routes(7, tuple(range(count)), fan_out)

    def take_part(replica):
        own = {"sum a": np.array([2.0**replica])}
        if adds is not None and replica not in adds:
            own = {}
        reduction = Reduction(Channel(board, replica), routes, root, replica)
        return reduction.result(own, add, lambda total: {**total, "made": np.ones(1)})

    there = [replica for replica in range(count) if replica not in lost]
    with ThreadPoolExecutor(count) as pool:
        results = dict(zip(there, pool.map(take_part, there), strict=True))
    return results, board.fetches


@pytest.mark.parametrize("count", [1, 2, 3, 9, 14])
@pytest.mark.parametrize("fan_out", [1, 2, 8])
def test_all_get_the_sum_of_all(count, fan_out):
    root = count // 2

    results, fetches = results_of(count, fan_out=fan_out, root=root)

    assert len(results) == count
    for result in results.values():
        assert result["sum a"].tolist() == [2.0**count - 1]
        assert "made" in result
    assert max(fetches.values(), default=0) <= fan_out + 1


def test_who_adds_nothing_gets_the_sum_of_the_others():
    results, _ = results_of(5, fan_out=2, adds=[1, 3])

    assert {r: result["sum a"].tolist() for r, result in results.items()} == (
        {r: [10.0] for r in range(5)}
    )


@pytest.mark.parametrize("lost", [0, 1, 4, 6])
def test_where_one_is_lost_nobody_gets_a_wrong_sum(lost):
    results, _ = results_of(7, fan_out=2, root=0, lost=[lost])

    assert results == dict.fromkeys((r for r in range(7) if r != lost), None)
