from daskdl.channel.run_state import Gathering


def test_present_members_are_awaited_until_they_have_arrived():
    gathering = Gathering()
    gathering.arrive(1, "one")

    assert gathering.awaited([2, 1, 0]) == [0, 2]


def test_it_is_complete_when_every_member_has_arrived():
    gathering = Gathering()
    gathering.arrive(1, "one")
    gathering.arrive(0, "zero")

    assert gathering.awaited([0, 1]) == []
    assert gathering.notes == {0: "zero", 1: "one"}


def test_a_retried_arrival_changes_nothing():
    gathering = Gathering()
    gathering.arrive(1, "first")

    gathering.arrive(1, "second")

    assert gathering.notes == {1: "first"}


def test_a_member_lost_after_it_arrived_keeps_its_note():
    gathering = Gathering()
    gathering.arrive(0, "zero")
    gathering.arrive(1, "one")

    assert gathering.awaited([0]) == []
    assert gathering.notes[1] == "one"


def test_what_is_told_to_the_client_is_kept_apart_and_once():
    gathering = Gathering()
    gathering.arrive(1, "one", b"rows")
    gathering.arrive(0, "zero")

    gathering.arrive(1, "one", b"others")

    assert gathering.notes == {0: "zero", 1: "one"}
    assert gathering.told == {0: b"", 1: b"rows"}


def test_it_is_not_settled_at_first():
    assert Gathering().gone is None
