"""What `Channel.drain` returns of pending updates, folded or not."""

import concurrent.futures
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl import codec
from daskdl.channel.inbox import UPDATE_BYTES
from daskdl.channel.leasing import RunSpec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import ChannelSpec
from tests.support.run_states import TIMEOUTS, extents

SIZE, GRID = 20, 2.0**-24
EACH = UPDATE_BYTES + 4  # of an update with one entry


def channels(count=3, **options):
    """Those of a run among threads, which all have joined."""
    spec = ChannelSpec(7, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS)
    spec = dataclasses.replace(spec, **options)
    plan = RunSpec(
        run=7,
        replicas=dict.fromkeys(range(count), "here"),
        sizes=extents({"train": ()}),
        seed=None,
        epochs_before=0,
        synchronous=spec.in_step,
        relay_bytes=0,
        min_replicas=1,
        timeouts=dataclasses.asdict(TIMEOUTS),
    )
    run = LocalRun(plan)
    made = [
        LocalChannel(run, dataclasses.replace(spec, replica=replica))
        for replica in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(LocalChannel.join, made))
    return made


def publish(channel, *entries, step=0, count=1):
    entries_K = np.array(sorted(entries, key=abs), np.int32)
    frame = lambda stamp: codec.encode(stamp, SIZE, count * GRID, entries_K)  # noqa: E731
    assert channel.publish(frame, step)


def stamps(drained):
    return [update.stamp[1:3] for update in drained.updates]


def counts(drained):
    """An independent sum of what was drained, in steps of the grid."""
    total_N = np.zeros(SIZE, np.int64)
    if drained.folded_N is not None:
        total_N += drained.folded_N
    for update in drained.updates:
        signs = np.sign(update.entries_K) * round(update.threshold / GRID)
        total_N[np.abs(update.entries_K) - 1] += signs
    return total_N.tolist()


def folded(drained, first):
    return [] if drained.folded_N is None else drained.folded_N[:first].tolist()


def test_they_come_by_replica_and_in_order_whenever_they_arrived():
    own, *others = channels()
    for replica in (2, 1, 2, 1):
        publish(others[replica - 1], replica)

    assert stamps(own.drain()) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert stamps(own.drain()) == []


def test_at_the_bound_nothing_is_folded_and_beyond_it_everything_once():
    own, *others = channels(inbox_bytes=EACH)
    publish(others[0], 1)
    assert (stamps(own.drain()), own.stats().folds) == ([(1, 1)], 0)

    publish(others[0], 1)
    publish(others[1], -1, 3, count=5)
    drained = own.drain()

    assert (stamps(drained), folded(drained, 4)) == ([], [-4, 0, 5, 0])
    assert own.stats().folds == 1
    assert own.drain().folded_N is None


def test_only_what_stays_counts_towards_the_bound():
    own, other = channels(2, inbox_bytes=2 * EACH)
    for step in (1, 2):
        publish(other, 1, step=step)
    own.drain(up_to_step=1)

    publish(other, 1, step=3)
    before = own.stats().folds
    publish(other, 1, step=3)

    assert (before, own.stats().folds) == (0, 1)


def test_a_fold_counts_in_steps_of_the_grid_that_the_replicas_agreed_on():
    own, other = channels(2, inbox_bytes=0)
    own.sync(0, GRID / 2)
    publish(other, 1)

    assert folded(own.drain(), 2) == [2, 0]


class TestInStep:
    def test_what_is_folded_of_a_later_step_stays(self):
        own, *others = channels(in_step=True, inbox_bytes=EACH)
        for other in others:
            for step in (4, 5):
                publish(other, step, step=step)

        four, nothing, five = (own.drain(step) for step in (4, 4, 5))

        assert (stamps(four), folded(four, 5)) == ([], [0, 0, 0, 2, 0])
        assert (stamps(nothing), nothing.folded_N) == ([], None)
        assert (stamps(five), folded(five, 5)) == ([], [0, 0, 0, 0, 2])

    @pytest.mark.parametrize("order", [1, -1])
    def test_whether_a_step_is_folded_does_not_depend_on_the_order(self, order):
        own, *others = channels(4, in_step=True, inbox_bytes=2 * EACH)
        entries = [(1, 2, 3), (4,), (5,)]  # folded with the second or the third
        for other, moved in [*zip(others, entries, strict=True)][::order]:
            publish(other, *moved, step=4)

        drained = own.drain(4)

        assert (stamps(drained), folded(drained, 6)) == ([], [1, 1, 1, 1, 1, 0])

    def test_all_that_is_folded_is_drained_as_one(self):
        own, other = channels(2, in_step=True, inbox_bytes=0)
        publish(other, 1, step=4)
        publish(other, 2, step=5)

        assert folded(own.drain(), 3) == [1, 1, 0]
        assert own.stats().folds == 2


UPDATES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.integers(1, SIZE), unique=True, max_size=SIZE),
        st.sampled_from([1, -1]),
        st.integers(1, 2**22),
    ),
    max_size=12,
)


@given(UPDATES, st.integers(0, 3 * EACH), st.randoms())
def test_folded_or_not_it_is_the_sum_of_what_was_published(
    updates, inbox_bytes, chance
):
    own, *others = channels(inbox_bytes=inbox_bytes)
    expected, got = np.zeros(SIZE, np.int64), np.zeros(SIZE, np.int64)
    for number, positions, sign, count in updates:
        publish(others[number], *(sign * p for p in positions), count=count)
        expected[np.array(positions, int) - 1] += sign * count
        if chance.random() < 0.3:
            got += counts(own.drain())

    got += counts(own.drain())

    assert got.tolist() == expected.tolist()
