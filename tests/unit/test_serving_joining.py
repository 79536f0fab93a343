import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.inference.batching import Call, Joining

WAIT_S = 2.0


def call(came, rows=1, kind="a", **more):
    return Call(np.zeros(rows), rows, kind, tensors=False, came=came, **more)


def joining(*calls, limit=4):
    lines = Joining(limit, WAIT_S)
    for one in calls:
        lines.add(one)
    return lines


def test_a_call_waits_for_others_and_leaves_with_those_that_came():
    calls = [call(0.0), call(1.0)]
    lines = joining(*calls)

    early = lines.take(1.9, hurry=False)
    late = lines.take(2.0, hurry=False)

    assert early == []
    assert late == calls
    assert len(lines) == 0


@pytest.mark.parametrize("rows", [[2, 2], [3, 2], [4], [1, 1, 1, 1]], ids=str)
def test_a_full_batch_waits_for_nothing(rows):
    lines = joining(*(call(0.0, n) for n in rows))

    assert lines.due_in(0.0) == 0.0
    batch = lines.take(0.0, hurry=False)

    assert [c.rows for c in batch] == ([3] if rows == [3, 2] else rows)


def test_a_hurry_lets_everything_leave_and_the_oldest_first():
    older, newer = call(1.0, kind="b"), call(2.0, kind="a")
    lines = joining(newer, older)

    assert lines.take(2.0, hurry=True) == [older]
    assert lines.take(2.0, hurry=True) == [newer]
    assert lines.take(2.0, hurry=True) == []


def test_the_wait_is_until_the_oldest_call_of_any_kind_has_waited():
    lines = joining(call(1.0, kind="a"), call(0.5, kind="b"))

    assert lines.due_in(1.0) == 1.5
    assert lines.due_in(9.0) == 0.0
    assert joining().due_in(0.0) is None


def test_what_comes_back_is_the_first_again_and_waits_no_more():
    first, second = call(0.0, losses=1), call(0.0, losses=1)
    lines = joining(call(0.0))

    lines.put_back([first, second])

    assert lines.take(0.0, hurry=False)[:2] == [first, second]


def test_a_call_that_is_to_be_alone_is_and_at_once():
    before, lonely, after = call(0.0), call(0.0, alone=True), call(0.0)
    lines = joining(before, lonely, after)

    assert lines.take(0.0, hurry=False) == [before]  # it is full: nothing fits in
    assert lines.take(0.0, hurry=False) == [lonely]
    assert lines.take(0.0, hurry=False) == []


def test_who_does_not_wait_any_more_is_left_out():
    gone, other = call(0.0), call(0.0)
    lines = joining(gone, other)

    assert lines.withdraw(gone)
    assert not lines.withdraw(gone)
    assert lines.take(WAIT_S, hurry=False) == [other]
    assert not lines.withdraw(other)
    assert lines.due_in(0.0) is None


def test_all_may_be_taken_away():
    calls = [call(0.0), call(0.0, kind="b")]
    lines = joining(*calls)

    assert lines.clear() == calls
    assert len(lines) == 0


KINDS = st.sampled_from("ab")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4), KINDS),
        st.tuples(st.just("take"), st.booleans(), st.floats(0, 3)),
    ),
    max_size=40,
)


@given(STEPS)
def test_every_call_leaves_once_in_its_order_with_its_kind_and_within_the_limit(steps):
    lines, now = Joining(4, WAIT_S), 0.0
    came, left = [], []
    for verb, one, other in steps:
        if verb == "add":
            came.append(call(now, one, other))
            lines.add(came[-1])
            continue
        now += other
        if batch := lines.take(now, hurry=one):
            assert sum(c.rows for c in batch) <= 4
            assert len({c.kind for c in batch}) == 1
        left += batch
    while batch := lines.take(now, hurry=True):
        left += batch

    for kind in "ab":
        own = [c for c in came if c.kind == kind]
        assert [c for c in left if c.kind == kind] == own


@given(st.lists(st.tuples(st.integers(1, 4), KINDS), min_size=1, max_size=20))
def test_nothing_is_late(calls):
    lines = joining(
        *(call(float(i), rows, kind) for i, (rows, kind) in enumerate(calls))
    )
    now = float(len(calls))

    while lines.take(now, hurry=False):
        pass

    wait_s = lines.due_in(now)
    assert wait_s is None or wait_s > 0
    assert wait_s is None or lines.take(now + wait_s, hurry=False)
