import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.inbox import UPDATE_BYTES, Inbox
from daskdl.codec import DenseUpdate
from tests.support.inboxes import GRID, SIZE, dense, filled, item_of, sparse


def counts_of(updates, folded_N=None):
    """An independent sum of updates, in steps of the grid."""
    total = [0] * SIZE if folded_N is None else [int(n) for n in folded_N]
    for update in updates:
        if isinstance(update, DenseUpdate):
            total = [a + int(b) for a, b in zip(total, update.counts_N, strict=True)]
            continue
        for entry in update.entries_K.tolist():
            sign = 1 if entry > 0 else -1
            total[abs(entry) - 1] += sign * round(update.threshold / GRID)
    return total


def test_what_was_put_is_taken_once():
    update = sparse(1, 1, [1, -4])
    inbox = filled(update)

    assert inbox.pending.take() == ([update], None)
    assert inbox.pending.take() == ([], None)


def test_a_duplicate_is_dropped_and_not_counted():
    update = sparse(1, 1, [1])
    inbox = filled(update)

    assert inbox.put(item_of(update), update) is False
    assert len(inbox.pending.take()[0]) == 1
    assert inbox.put(item_of(update), update) is False
    assert inbox.pending.take()[0] == []
    assert inbox.received_bytes == 64


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_what_is_taken_does_not_depend_on_arrival(seed):
    updates = [sparse(origin, s, [1]) for origin in (0, 1, 2) for s in (1, 2, 3)]
    shuffled = random.Random(seed).sample(updates, len(updates))

    assert filled(*shuffled).pending.take()[0] == updates


def test_updates_of_a_later_step_are_held_back():
    early, late = sparse(1, 1, [1], step=4), sparse(1, 2, [2], step=5)
    inbox = filled(early, late)

    assert inbox.pending.take(4)[0] == [early]
    assert inbox.pending.take(4)[0] == []
    assert inbox.pending.take(5)[0] == [late]


def test_what_is_held_back_still_counts_towards_the_bound():
    late = sparse(1, 1, range(1, 11), step=5)
    inbox = filled(late, limit_bytes=UPDATE_BYTES + 40)
    inbox.pending.take(4)

    more = sparse(2, 1, [1], step=5)
    inbox.put(item_of(more), more)

    assert inbox.pending.folds == 1


def test_at_the_bound_nothing_is_folded_and_beyond_it_everything():
    first, second = sparse(1, 1, [1, 2]), sparse(2, 1, [-2, 3], count=5)
    inbox = filled(first, limit_bytes=UPDATE_BYTES + 8)
    assert inbox.pending.folds == 0

    inbox.put(item_of(second), second)
    updates, folded_N = inbox.pending.take()

    assert updates == []
    assert folded_N.dtype == np.int32
    assert folded_N.tolist() == [1, -4, 5] + [0] * 17
    assert inbox.pending.folds == 1


def test_a_fold_is_taken_once():
    inbox = filled(sparse(1, 1, [1]), limit_bytes=0)

    assert inbox.pending.take()[1] is not None
    assert inbox.pending.take() == ([], None)


def test_a_fold_uses_the_grid_of_the_last_barrier():
    inbox = filled(limit_bytes=0)
    inbox.pending.grid = 4 * GRID

    update = sparse(1, 1, [1], count=8)
    inbox.put(item_of(update), update)

    assert inbox.pending.take()[1][0] == 2


def test_a_fold_leaves_the_updates_alone():
    update = dense(1, 1, range(SIZE))
    second = dense(1, 2, [1] * SIZE)

    filled(update, second, limit_bytes=0)

    assert update.counts_N.tolist() == list(range(SIZE))


UPDATES = st.lists(
    st.one_of(
        st.tuples(
            st.lists(st.integers(1, SIZE), unique=True, max_size=SIZE),
            st.integers(1, 2**22),
            st.booleans(),
        ),
        st.lists(st.integers(-(2**22), 2**22), min_size=SIZE, max_size=SIZE),
    ),
    max_size=12,
)


@given(UPDATES, st.integers(0, 200), st.randoms(), st.booleans())
def test_folded_or_not_what_is_taken_is_the_sum_of_what_was_put(
    drawn, limit_bytes, arrival, between
):
    updates = []
    for number, content in enumerate(drawn, start=1):
        if isinstance(content, list):
            updates.append(dense(1, number, content))
        else:
            positions, count, negative = content
            signs = -1 if negative else 1
            entries = [signs * p for p in sorted(positions)]
            updates.append(sparse(1, number, entries, count))
    inbox, got = Inbox(SIZE, GRID, limit_bytes), [0] * SIZE
    order = list(updates)
    arrival.shuffle(order)

    for update in order:
        inbox.put(item_of(update), update)
        waiting = inbox.pending._waiting  # memory is what this test is about
        assert sum(u[-1].nbytes for u in waiting) <= limit_bytes
        if between:
            taken = inbox.pending.take()
            part = counts_of(*taken)
            got = [a + b for a, b in zip(got, part, strict=True)]
    got = [a + b for a, b in zip(got, counts_of(*inbox.pending.take()), strict=True)]

    assert got == counts_of(updates)
