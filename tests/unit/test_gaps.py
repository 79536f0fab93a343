from daskdl.channel.recovery import PATIENCE_S, Gaps


def test_what_is_only_late_is_not_asked_for():
    gaps = Gaps()

    assert gaps.due({7: [3]}, 0.0) == {}
    assert gaps.due({7: [3]}, 0.9 * PATIENCE_S) == {}
    assert gaps.due({7: [3]}, PATIENCE_S) == {7: [3]}


def test_each_waits_from_when_it_was_missed():
    gaps = Gaps()
    gaps.due({7: [3]}, 0.0)

    assert gaps.due({7: [3, 4], 8: [1]}, PATIENCE_S) == {7: [3]}
    assert gaps.due({7: [4], 8: [1]}, 2 * PATIENCE_S) == {7: [4], 8: [1]}


def test_what_was_asked_for_is_asked_for_again_but_not_at_once():
    gaps = Gaps()
    gaps.due({7: [3]}, 0.0)
    gaps.due({7: [3]}, PATIENCE_S)

    assert gaps.due({7: [3]}, 1.5 * PATIENCE_S) == {}
    assert gaps.due({7: [3]}, 2 * PATIENCE_S) == {7: [3]}


def test_what_came_is_forgotten():
    gaps = Gaps()
    gaps.due({7: [3]}, 0.0)
    gaps.due({}, 0.5 * PATIENCE_S)

    assert gaps.due({7: [3]}, PATIENCE_S) == {}
