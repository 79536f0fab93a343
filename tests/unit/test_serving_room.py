import pytest

from daskdl.errors import BusyError, DaskDLError
from daskdl.inference.batching import Room


def test_beyond_the_limit_nothing_gets_in_and_the_message_says_what_waits():
    room = Room(10)
    room.enter(4)
    room.enter(4)

    with pytest.raises(
        BusyError, match=r"2 calls wait with 8 rows, 3 more .*=10; call"
    ):
        room.enter(3)

    room.enter(2)
    assert issubclass(BusyError, DaskDLError)
    assert issubclass(BusyError, RuntimeError)


def test_who_leaves_makes_room_and_says_so():
    room = Room(10)
    room.enter(10)
    freed = room.freed()
    assert not freed.done()

    room.leave(10)

    assert freed.done()
    assert not room.freed().done()
    room.enter(10)
