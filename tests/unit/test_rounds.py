import pytest

from daskdl.training.parameter_averaging import Said, round_of


def said(mean=4, examples=10, seen=4, **more):
    return list(Said(seen, mean, examples, **more))


def test_means_are_weighted_by_examples():
    decided = round_of({0: said(examples=30), 1: said(examples=10)}, gone=[])

    assert decided.weights == {0: 0.75, 1: 0.25}
    assert decided.members == decided.current == (0, 1)


def test_who_has_trained_on_nothing_gets_the_mean_and_adds_nothing():
    decided = round_of({0: said(), 1: said(examples=0)}, gone=[])

    assert (decided.weights, decided.members) == ({0: 1.0}, (0, 1))


def test_who_missed_a_mean_that_counted_it_adds_nothing():
    decided = round_of({0: said(), 1: said(mean=3)}, gone=[])

    assert decided.weights == {0: 1.0}
    assert (decided.members, decided.current) == ((0, 1), (0,))


def test_a_mean_that_nobody_got_is_made_again():
    decided = round_of({0: said(mean=3, seen=4), 1: said(mean=3, seen=4)}, gone=[])

    assert decided.number == 5
    assert decided.weights == {0: 0.5, 1: 0.5}


def test_who_was_lost_is_left_out_whatever_it_had_said():
    decided = round_of({0: said(), 1: said(mean=9)}, gone=[1, 7])

    assert (decided.latest, decided.members) == (4, (0,))


def test_who_waits_for_a_lease_is_no_member_but_may_have_the_latest():
    notes = {0: said(mean=3, examples=0), 1: said(examples=0, parked=True)}

    decided = round_of(notes, gone=[])

    assert (decided.weights, decided.members) == ({}, (0,))
    assert decided.current == decided.donors == (1,)


def test_a_number_is_new_to_all():
    assert round_of({0: said(seen=7), 1: said(seen=2)}, gone=[]).number == 8


def test_the_root_is_one_that_has_the_latest_mean():
    notes = {0: said(mean=3), 1: said(), 2: said(), 3: said(parked=True, examples=0)}

    roots = {round_of({**notes, 1: said(seen=n)}, []).root for n in range(4, 12)}

    assert roots == {1, 2}


@pytest.mark.parametrize(
    ("notes", "over"),
    [
        ([said(examples=0, ended=True)] * 2, True),
        ([said(examples=0, ended=True), said(examples=0)], False),
        ([said(examples=0, ended=True), said(examples=3, ended=True)], False),
        ([said(examples=0, ended=True), said(3, 0, ended=True)], False),
        ([said(examples=0, ended=True), said(examples=0, ended=True, digest=1)], False),
    ],
)
def test_an_epoch_is_over_when_all_have_ended_with_the_same(notes, over):
    assert round_of(dict(enumerate(notes)), gone=[]).over is over


def test_who_has_other_parameters_at_the_end_takes_those_of_the_first():
    notes = {
        1: said(examples=0, ended=True, digest=5),
        2: said(examples=0, ended=True, digest=6),
    }

    decided = round_of(notes, gone=[])

    assert decided.current == decided.donors == (1,)


def ended(**more):
    return said(examples=0, ended=True, **more)


def test_what_rounding_has_left_is_sent_when_all_have_ended_and_moves_nothing_else():
    decided = round_of({0: ended(), 1: ended(owes=True), 2: ended()}, gone=[])

    assert not decided.over
    assert decided.settles
    assert decided.whole
    assert decided.weights == {decided.root: 1.0}
    assert decided.members == (0, 1, 2)


@pytest.mark.parametrize(
    "notes",
    [
        [ended(), said(examples=0, owes=True)],  # one goes on
        [ended(), ended()],
        [said(owes=True), said()],
    ],
)
def test_else_it_is_not(notes):
    assert not round_of(dict(enumerate(notes)), gone=[]).settles


@pytest.mark.parametrize(
    ("notes", "whole"),
    [
        ([said(), said()], False),
        ([said(), said(examples=0)], False),
        ([said(), said(), said(mean=3, examples=0, parked=True)], False),
        ([said()], True),  # there is nobody to send to
        ([said(), said(mean=3)], True),
        ([said(), said(mean=-1, examples=0)], True),
        ([said(mean=-1, seen=0), said(mean=-1, seen=0)], True),
        ([ended(), ended(owes=True)], True),
        ([said(rests=True), said(rests=True)], True),
        ([said(rests=True), said()], False),
        ([said(rests=True), said(), said(examples=0, parked=True, rests=True)], False),
    ],
    ids=[
        *("all", "idle", "parked", "alone", "late", "new", "no mean", "ended"),
        *("all rest", "one rests", "one parked"),
    ],
)
def test_differences_are_averaged_among_those_that_have_the_latest_mean(notes, whole):
    assert round_of(dict(enumerate(notes)), gone=[]).whole is whole
