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
    with pytest.raises(TimeoutError):
        scatter(Client(never), {"k": 1}, ["tcp://a"], 0.01)


@pytest.mark.parametrize("answer", [removed, unknown])
def test_a_worker_that_was_removed_is_gone(answer):
    with pytest.raises(OSError, match=r"removed a worker of \['tcp://a'\]"):
        scatter(Client(answer), {"k": 1}, ["tcp://a"], 5)
