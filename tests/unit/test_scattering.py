"""Sending data to a worker that does not take it ends in time."""

import asyncio

import pytest

from daskdl.data.scattering import scatter


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
    client = Client(at_once)

    assert scatter(client, {"k": 1}, workers, 5) == {"k": "future of k"}
    assert client.asked == [({"k": 1}, workers, broadcast, True)]


def test_a_worker_that_does_not_take_it_is_not_waited_for():
    with pytest.raises(TimeoutError, match=r"tcp://a did not take k within 0\.01 s"):
        scatter(Client(never), {"k": 1}, ["tcp://a"], 0.01)


def test_what_arrives_too_late_is_let_go():
    released = []

    class Late:
        def release(self):
            released.append(True)

    async def late(data):
        await asyncio.sleep(0.05)
        return {key: Late() for key in data}

    class Patient(Client):
        def sync(self, function):
            async def afterwards():
                with pytest.raises(TimeoutError):
                    await function()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*others)

            asyncio.run(afterwards())
            raise TimeoutError

    with pytest.raises(TimeoutError):
        scatter(Patient(late), {"a": 1, "b": 2}, ["tcp://a"], 0.01)

    assert released == [True, True]


@pytest.mark.parametrize("answer", [removed, unknown])
def test_a_worker_that_was_removed_is_gone(answer):
    with pytest.raises(OSError, match=r"removed a worker of \['tcp://a'\]"):
        scatter(Client(answer), {"k": 1}, ["tcp://a"], 5)
