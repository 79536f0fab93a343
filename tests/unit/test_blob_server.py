import asyncio

import numpy as np
import pytest

from daskdl.channel import protocol
from daskdl.channel.protocol import BlobParts, join, unwrap
from daskdl.channel.worker import BlobServer

WAIT_S = 30  # of a test that would fail otherwise
ARRAYS = {"a": np.arange(40, dtype=np.int64)}


async def fetched(shelf, name):
    """All parts of a parcel, as another replica asks for them."""
    first = await shelf.blob(name, 0, WAIT_S)
    others = [await shelf.blob(name, i, WAIT_S) for i in range(1, first["parts"])]
    return join(first["forms"], [unwrap(one["bytes"]) for one in (first, *others)])


def on_a_loop(test):
    """Run a test that gets a shelf, on an event loop."""

    async def run():
        await test(BlobServer())

    return lambda: asyncio.run(run())


@on_a_loop
async def test_what_is_there_is_answered_in_parts(shelf):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "PART_BYTES", 64)
        await shelf.publish("mean", BlobParts(ARRAYS))

        arrays = await fetched(shelf, "mean")

    np.testing.assert_array_equal(arrays["a"], ARRAYS["a"])
    assert shelf.sent_bytes == 320


@on_a_loop
async def test_who_comes_first_waits(shelf):
    asking = asyncio.ensure_future(fetched(shelf, "mean"))
    await asyncio.sleep(0)
    assert not asking.done()

    await shelf.publish("mean", BlobParts(ARRAYS))

    arrays = await asyncio.wait_for(asking, WAIT_S)
    np.testing.assert_array_equal(arrays["a"], ARRAYS["a"])


@on_a_loop
async def test_what_does_not_come_is_a_time_out_and_may_come_later(shelf):
    with pytest.raises(TimeoutError):
        await shelf.blob("mean", 0, 0.01)

    await shelf.publish("mean", BlobParts(ARRAYS))

    assert await fetched(shelf, "mean")


@on_a_loop
async def test_what_is_cleared_is_not_there_but_who_waits_goes_on_waiting(shelf):
    waiting = asyncio.ensure_future(fetched(shelf, "later"))
    for name in ("mean", "state"):
        await shelf.publish(name, BlobParts(ARRAYS))
    await fetched(shelf, "mean")

    await shelf.drop(keep="state")

    assert await fetched(shelf, "state")
    with pytest.raises(TimeoutError):
        await shelf.blob("mean", 0, 0.01)
    await shelf.publish("later", BlobParts(ARRAYS))
    assert await asyncio.wait_for(waiting, WAIT_S)


@on_a_loop
async def test_a_second_parcel_of_a_name_changes_nothing(shelf):
    await shelf.publish("mean", BlobParts(ARRAYS))
    await shelf.publish("mean", BlobParts({"b": np.arange(3)}))

    assert (await fetched(shelf, "mean")).keys() == {"a"}
