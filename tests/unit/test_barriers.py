import pytest

from daskdl.channel.run_state import Barriers

MEMBERS = [0, 1, 2]


def test_a_round_does_not_wait_for_who_waits_for_a_lease():
    barriers = Barriers()
    gathering = barriers.arrive("r", 0, "zero", kind="round")
    barriers.arrive("r", 1, "one", kind="round")
    assert not barriers.over(gathering, MEMBERS)

    barriers.stand_by(2, "what it said")

    assert barriers.over(gathering, MEMBERS)
    barriers.settle("r", gathering, {})
    assert gathering.notes == {0: "zero", 1: "one", 2: "what it said"}


@pytest.mark.parametrize("kind", ["agree", "report", "meet"])
def test_other_barriers_wait_for_it(kind):
    barriers = Barriers()
    barriers.stand_by(2, "what it said")
    barriers.arrive("r", 0, "zero", kind=kind)
    gathering = barriers.arrive("r", 1, "one", kind=kind)

    assert not barriers.over(gathering, MEMBERS)


def test_who_resumes_is_waited_for_again():
    barriers = Barriers()
    barriers.stand_by(2, "what it said")
    barriers.arrive("r", 0, "zero", kind="round")
    gathering = barriers.arrive("r", 1, "one", kind="round")

    barriers.resume(2)

    assert not barriers.over(gathering, MEMBERS)


def test_one_that_comes_itself_is_heard_itself():
    barriers = Barriers()
    barriers.stand_by(1, "before")
    gathering = barriers.arrive("r", 0, "zero", kind="round")
    barriers.arrive("r", 1, "now", kind="round")

    barriers.settle("r", gathering, {})

    assert gathering.notes[1] == "now"


def test_where_some_come_for_a_round_it_is_one():
    barriers = Barriers()
    gathering = barriers.arrive("r", 0, "zero", kind="agree")
    assert gathering.kind == "agree"

    barriers.arrive("r", 1, "one", kind="round")

    assert gathering.kind == "round"


def test_a_key_is_free_again_once_its_gathering_is_settled():
    barriers = Barriers()
    first = barriers.arrive("r", 0, "zero", kind="round")

    barriers.settle("r", first, {5: 3})

    assert first.gone == {5: 3}
    assert barriers.arrive("r", 0, "zero", kind="round") is not first
