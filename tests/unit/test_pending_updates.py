"""What waits to be applied, and what becomes of it beyond the bound."""

import pytest

from daskdl.channel.inbox import UPDATE_BYTES, PendingUpdates
from tests.support.inboxes import GRID, SIZE, dense, sparse

EACH = UPDATE_BYTES + 4  # of an update with one entry


def piled(*updates, limit_bytes=10**9):
    pile = PendingUpdates(SIZE, GRID, limit_bytes)
    for update in updates:
        pile.add(update)
    return pile


def test_all_is_taken_once_by_origin_and_sequence():
    updates = [sparse(2, 1, [1]), sparse(1, 2, [1]), sparse(1, 1, [1])]
    pile = piled(*updates)

    taken = pile.take()

    assert taken[0] == updates[::-1]
    assert taken[1] is None
    assert pile.take() == ([], None)


@pytest.mark.parametrize(("step", "count"), [(3, 0), (4, 1), (5, 2)])
def test_what_is_of_a_later_step_stays(step, count):
    pile = piled(sparse(1, 1, [1], step=4), sparse(1, 2, [1], step=5))

    assert len(pile.take(step)[0]) == count
    assert len(pile) == 2 - count


def test_beyond_the_bound_all_of_it_becomes_one_vector_again_and_again():
    pile = piled(sparse(1, 1, [2]), limit_bytes=EACH)
    assert (pile.folds, len(pile)) == (0, 1)

    pile.add(sparse(2, 1, [-3], count=5))
    pile.add(dense(3, 1, [1] * SIZE))

    updates, folded_N = pile.take()
    assert (pile.folds, updates) == (2, [])
    assert folded_N.tolist() == [1, 2, -4] + [1] * (SIZE - 3)


def test_only_what_stays_counts_for_the_bound():
    pile = piled(*(sparse(1, i, [1]) for i in (1, 2)), limit_bytes=2 * EACH)
    pile.take(up_to_step=1)

    pile.add(sparse(1, 3, [1]))
    assert pile.folds == 0
    pile.add(sparse(1, 4, [1]))
    assert pile.folds == 1


def test_nothing_is_left_of_what_was_forgotten():
    pile = piled(*(sparse(1, i, [1]) for i in (1, 2, 3)), limit_bytes=2 * EACH)
    pile.add(sparse(1, 4, [1]))

    pile.clear()
    pile.add(sparse(1, 5, [1]))
    pile.add(sparse(1, 6, [1]))

    assert pile.folds == 1
    taken = pile.take()
    assert len(taken[0]) == 2
    assert taken[1] is None


def test_a_vector_counts_in_steps_of_the_grid_of_the_run():
    pile = piled(limit_bytes=0)
    pile.grid = GRID / 2

    pile.add(sparse(1, 1, [1]))

    assert pile.take()[1][0] == 2


class TestInStep:
    def piled(self, *updates, limit_bytes=EACH):
        pile = PendingUpdates(SIZE, GRID, limit_bytes, in_step=True)
        for update in updates:
            pile.add(update)
        return pile

    def test_what_is_folded_of_a_later_step_stays(self):
        pile = self.piled(
            *(sparse(origin, 1, [1], step=4) for origin in (1, 2)),
            *(sparse(origin, 2, [2], step=5) for origin in (1, 2)),
        )

        four, nothing, five = pile.take(4), pile.take(4), pile.take(5)

        assert nothing == ([], None)
        assert (four[1][:2].tolist(), four[0]) == ([2, 0], [])
        assert (five[1][:2].tolist(), five[0]) == ([0, 2], [])

    def test_one_step_does_not_count_for_the_bound_of_another(self):
        updates = [sparse(1, 1, [1], step=4), sparse(1, 2, [2], step=5)]
        pile = self.piled(*updates)

        assert pile.folds == 0
        assert pile.take() == (updates, None)

    def test_whether_it_is_folded_does_not_depend_on_the_order(self):
        large, small = sparse(1, 1, [1, 2], step=4), sparse(2, 1, [3], step=4)

        first = self.piled(large, small).take(4)
        last = self.piled(small, large).take(4)

        assert first[0] == last[0] == []
        assert first[1].tolist() == last[1].tolist()

    def test_all_that_is_folded_is_taken_as_one(self):
        pile = self.piled(
            *(sparse(1, n, [n], step=step) for n, step in ((1, 4), (2, 5))),
            limit_bytes=0,
        )

        assert pile.take()[1][:3].tolist() == [1, 1, 0]
        assert pile.folds == 2
