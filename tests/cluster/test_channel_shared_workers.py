"""Several replicas on one worker: the relay sends it what is for all of them once."""

from daskdl import codec
from daskdl.channel import protocol, scheduler
from daskdl.channel.protocol import MESSAGE_BYTES, Answer
from tests.support.channels import (
    RUN,
    a_run,
    frame_of,
    in_thread,
    item_of,
    publish,
    recorded,
    totals,
    wait_until,
    workers,
)


@workers(2)
async def test_an_update_goes_once_to_a_worker_and_to_all_its_replicas(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, b, b) as run:
        alone = recorded(b.handlers, protocol.DELIVER, monkeypatch)
        together = recorded(b.handlers, protocol.DELIVER_BATCHES, monkeypatch)

        assert publish(run.channels[0], 1, -7)
        for replica in (1, 2, 3):
            await in_thread(run.channels[replica].wait_for_updates, {0: 1})

        updates = [
            item
            for fields in together
            for item in fields["messages"]
            if item[0] == "update"
        ]
        assert len(updates) == 1
        assert not [
            i for fields in alone for i in fields["messages"] if i[0] == "update"
        ]
        arrived = [totals(run.channels[r].drain()) for r in (1, 2, 3)]
        assert arrived[0] == arrived[1] == arrived[2]
        assert (arrived[0][0], arrived[0][6]) == (1, -1)


@workers(2)
async def test_a_shared_update_counts_once_for_the_bound_of_a_request(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, b) as run:
        together = recorded(b.handlers, protocol.DELIVER_BATCHES, monkeypatch)
        small = len(frame_of(run.next_stamp(0, 0), 1)) + MESSAGE_BYTES
        monkeypatch.setattr(scheduler, "BATCH_BYTES", small)

        assert publish(run.channels[0])
        for replica in (1, 2):
            await in_thread(run.channels[replica].wait_for_updates, {0: 1})
        fits = len(together)
        monkeypatch.setattr(scheduler, "BATCH_BYTES", 0)
        assert publish(run.channels[0])
        for replica in (1, 2):
            await in_thread(run.channels[replica].wait_for_updates, {0: 2})

        assert (fits, len(together)) == (1, 1)


@workers(2)
async def test_a_frame_is_decoded_once_per_worker(c, s, a, b, monkeypatch):
    decode_all, decoded = codec.decode_all, []

    def decoding(frames, **expected):
        decoded.extend(frames)
        return decode_all(frames, **expected)

    async with a_run(c, s, a, b, b, b) as run:
        monkeypatch.setattr(codec, "decode_all", decoding)

        assert publish(run.channels[0])
        for replica in (1, 2, 3):
            await in_thread(run.channels[replica].wait_for_updates, {0: 1})

        assert len(decoded) == 1


@workers(2)
async def test_a_replica_that_holds_back_does_not_block_others_on_its_worker(
    c, s, a, b
):
    async with a_run(c, s, a, b, b) as run:
        run.link(1).inbox.hold()

        assert publish(run.channels[0])
        await in_thread(run.channels[2].wait_for_updates, {0: 1})
        before = run.received(1, 0)[0]
        run.link(1).inbox.barrier.release()
        await in_thread(run.channels[1].wait_for_updates, {0: 1})

        assert before == 0


@workers(2)
async def test_an_invalid_frame_is_refused_by_each_replica(c, s, a, b):
    async with a_run(c, s, a, b, b) as run:
        stamp = run.next_stamp(0, 0)
        frame = frame_of(stamp, 1)
        frame[-1] ^= 1

        answer = await s.rpc(b.address).daskdl_deliver_batches(
            run=RUN,
            secret=run.spec.secret,
            messages=[item_of(stamp, frame)],
            shares=[(1, [0]), (2, [0])],
        )

        assert answer["status"] == Answer.OK
        await wait_until(lambda: run.channels[1].stats().refused == 1)
        assert run.channels[2].stats().refused == 1
        assert (run.received(1, 0)[0], run.received(2, 0)[0]) == (0, 0)
