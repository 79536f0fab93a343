import pytest

from daskdl.training.parameter_averaging import RoundDecision, Vote


def vote(mean=4, examples=10, seen=4, **more):
    return Vote(seen, mean, examples, **more)


def test_means_are_weighted_by_examples():
    decided = RoundDecision.of({0: vote(examples=30), 1: vote(examples=10)}, gone=[])

    assert decided.weights == {0: 0.75, 1: 0.25}
    assert decided.members == decided.current == (0, 1)


def test_who_has_trained_on_nothing_gets_the_mean_and_adds_nothing():
    decided = RoundDecision.of({0: vote(), 1: vote(examples=0)}, gone=[])

    assert (decided.weights, decided.members) == ({0: 1.0}, (0, 1))


def test_who_missed_a_mean_that_counted_it_adds_nothing():
    decided = RoundDecision.of({0: vote(), 1: vote(mean=3)}, gone=[])

    assert decided.weights == {0: 1.0}
    assert (decided.members, decided.current) == ((0, 1), (0,))


def test_a_mean_that_nobody_got_is_made_again():
    decided = RoundDecision.of(
        {0: vote(mean=3, seen=4), 1: vote(mean=3, seen=4)}, gone=[]
    )

    assert decided.number == 5
    assert decided.weights == {0: 0.5, 1: 0.5}


def test_who_was_lost_is_left_out_whatever_it_had_vote():
    decided = RoundDecision.of({0: vote(), 1: vote(mean=9)}, gone=[1, 7])

    assert (decided.latest, decided.members) == (4, (0,))


def test_who_waits_for_a_lease_is_no_member_but_may_have_the_latest():
    notes = {0: vote(mean=3, examples=0), 1: vote(examples=0, parked=True)}

    decided = RoundDecision.of(notes, gone=[])

    assert (decided.weights, decided.members) == ({}, (0,))
    assert decided.current == decided.donors == (1,)


def test_a_number_is_new_to_all():
    assert RoundDecision.of({0: vote(seen=7), 1: vote(seen=2)}, gone=[]).number == 8


def test_the_root_is_one_that_has_the_latest_mean():
    notes = {0: vote(mean=3), 1: vote(), 2: vote(), 3: vote(parked=True, examples=0)}

    roots = {
        RoundDecision.of({**notes, 1: vote(seen=n)}, []).root for n in range(4, 12)
    }

    assert roots == {1, 2}


@pytest.mark.parametrize(
    ("notes", "over"),
    [
        ([vote(examples=0, ended=True)] * 2, True),
        ([vote(examples=0, ended=True), vote(examples=0)], False),
        ([vote(examples=0, ended=True), vote(examples=3, ended=True)], False),
        ([vote(examples=0, ended=True), vote(3, 0, ended=True)], False),
        ([vote(examples=0, ended=True), vote(examples=0, ended=True, digest=1)], False),
    ],
)
def test_an_epoch_is_over_when_all_have_ended_with_the_same(notes, over):
    assert RoundDecision.of(dict(enumerate(notes)), gone=[]).over is over


def test_who_has_other_parameters_at_the_end_takes_those_of_the_first():
    notes = {
        1: vote(examples=0, ended=True, digest=5),
        2: vote(examples=0, ended=True, digest=6),
    }

    decided = RoundDecision.of(notes, gone=[])

    assert decided.current == decided.donors == (1,)


def ended(**more):
    return vote(examples=0, ended=True, **more)


def test_what_rounding_has_left_is_sent_when_all_have_ended_and_moves_nothing_else():
    decided = RoundDecision.of({0: ended(), 1: ended(owes=True), 2: ended()}, gone=[])

    assert not decided.over
    assert decided.settles
    assert decided.whole
    assert decided.weights == {decided.root: 1.0}
    assert decided.members == (0, 1, 2)


@pytest.mark.parametrize(
    "notes",
    [
        [ended(), vote(examples=0, owes=True)],  # one goes on
        [ended(), ended()],
        [vote(owes=True), vote()],
    ],
)
def test_else_it_is_not(notes):
    assert not RoundDecision.of(dict(enumerate(notes)), gone=[]).settles


@pytest.mark.parametrize(
    ("notes", "whole"),
    [
        ([vote(), vote()], False),
        ([vote(), vote(examples=0)], False),
        ([vote(), vote(), vote(mean=3, examples=0, parked=True)], False),
        ([vote()], True),  # there is nobody to send to
        ([vote(), vote(mean=3)], True),
        ([vote(), vote(mean=-1, examples=0)], True),
        ([vote(mean=-1, seen=0), vote(mean=-1, seen=0)], True),
        ([ended(), ended(owes=True)], True),
        ([vote(rests=True), vote(rests=True)], True),
        ([vote(rests=True), vote()], False),
        ([vote(rests=True), vote(), vote(examples=0, parked=True, rests=True)], False),
    ],
    ids=[
        *("all", "idle", "parked", "alone", "late", "new", "no mean", "ended"),
        *("all rest", "one rests", "one parked"),
    ],
)
def test_differences_are_averaged_among_those_that_have_the_latest_mean(notes, whole):
    assert RoundDecision.of(dict(enumerate(notes)), gone=[]).whole is whole
