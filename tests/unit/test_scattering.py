"""Sending data to a worker that does not take it ends in time."""

import asyncio

import pytest

from daskdl.config import Bound
from daskdl.data.distribute import scatter
from daskdl.errors import WaitTimeoutError

SOON = Bound(0.01, ("join",))


class Client:
    """As much of a client as scattering asks of one."""

    def __init__(self, answer):
        self._answer = answer
        self.asked = []

    def sync(self, function):
        return asyncio.run(function())

    async def scatter(self, data, workers, broadcast, asynchronous):
        self.asked.append((data, workers, broadcast, asynchronous))
        return await self._answer(data)


async def at_once(data):
    return {key: f"future of {key}" for key in data}


async def removed(data):
    raise KeyError("tcp://a")


async def unknown(data):
    raise ValueError("no worker of that name")


async def never(data):
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("workers", "broadcast"), [(["tcp://a"], False), (["tcp://a", "tcp://b"], True)]
)
def test_all_of_the_workers_get_it(workers, broadcast):
    client, bound = Client(at_once), Bound(5, ("join",))

    assert scatter(client, {"k": 1}, workers, bound, "it") == {"k": "future of k"}
    assert client.asked == [({"k": 1}, workers, broadcast, True)]


def test_workers_that_do_not_take_it_are_named_and_not_waited_for():
    workers = ["tcp://a", "tcp://b"]

    with pytest.raises(WaitTimeoutError) as caught:
        scatter(Client(never), {"k": 1}, workers, SOON, "the model (8 bytes)")

    assert str(caught.value) == (
        "the model (8 bytes) could not be sent to tcp://a, tcp://b within 0.01 s "
        "(daskdl.timeouts.join); is the way there slow, or a worker busy?"
    )


def test_what_arrives_too_late_is_let_go():
    released = []

    class Late:
        def release(self):
            released.append(True)

    too_late = asyncio.Event()

    async def late(data):
        await too_late.wait()
        return {key: Late() for key in data}

    class Patient(Client):
        def sync(self, function):
            async def afterwards():
                with pytest.raises(TimeoutError):
                    await function()
                too_late.set()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*others)

            asyncio.run(afterwards())
            raise TimeoutError

    with pytest.raises(TimeoutError):
        scatter(Patient(late), {"a": 1, "b": 2}, ["tcp://a"], SOON, "it")

    assert released == [True, True]


@pytest.mark.parametrize("answer", [removed, unknown])
def test_a_worker_that_was_removed_is_gone(answer):
    with pytest.raises(OSError, match=r"removed a worker of \['tcp://a'\]"):
        scatter(Client(answer), {"k": 1}, ["tcp://a"], SOON, "it")
