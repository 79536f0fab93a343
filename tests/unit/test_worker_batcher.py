import asyncio
import contextlib

import pytest

from daskdl.channel.protocol import Answer, Message, MessageKind
from daskdl.channel.scheduler import WorkerBatcher
from daskdl.channel.sender import BATCH_BYTES
from daskdl.config import Bound

PATIENCE_S = 20


def update(origin, sequence, nbytes=100):
    return Message(MessageKind.UPDATE.value, origin, sequence, 0, nbytes)


def taken(count):
    return {"status": Answer.OK.value, "accepted": count}


class Worker:
    """Takes all, unless told otherwise for a replica; requests are kept."""

    def __init__(self, **answers):
        self.requests = []
        self.answers = {int(name[1:]): own for name, own in answers.items()}
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, items, shares):
        self.requests.append(
            {r: [items[place].sequence for place in places] for r, places in shares}
        )
        self.sent = len(items)
        self.asked.set()
        await self.may_answer.wait()
        answers = [self.answers.get(r, taken(len(own))) for r, own in shares]
        return {"status": Answer.OK.value, "answers": answers}


def batcher_of(worker, *replicas, seconds=PATIENCE_S):
    bound = Bound(seconds, ("request",))
    batcher = WorkerBatcher("tcp://there", worker.ask, bound)
    batcher.replicas.update(replicas)
    return batcher


async def both(*deliveries):
    return await asyncio.wait_for(
        asyncio.gather(*deliveries, return_exceptions=True), PATIENCE_S
    )


class TestWhatIsSent:
    async def _together(self):
        worker, shared = Worker(), update(9, 1)
        batcher = batcher_of(worker, 0, 1)
        accepted = await both(
            batcher.deliver(0, [shared, update(1, 5)]), batcher.deliver(1, [shared])
        )
        return worker, accepted

    def test_what_is_sent_at_the_same_time_goes_in_one_request(self):
        worker, accepted = asyncio.run(self._together())

        assert worker.requests == [{0: [1, 5], 1: [1]}]
        assert accepted == [2, 1]

    def test_what_is_for_several_goes_once(self):
        worker, _ = asyncio.run(self._together())

        assert worker.sent == 2

    def test_equal_items_that_are_not_the_same_both_go(self):
        async def run():
            worker = Worker()
            batcher = batcher_of(worker, 0, 1)
            await both(
                batcher.deliver(0, [update(9, 1)]), batcher.deliver(1, [update(9, 1)])
            )
            return worker.sent

        assert asyncio.run(run()) == 2

    def test_one_that_is_some_turns_of_the_loop_late_goes_with_the_others(self):
        async def run():
            worker = Worker()
            batcher = batcher_of(worker, 0, 1)
            first = asyncio.ensure_future(batcher.deliver(0, [update(9, 1)]))
            for _ in range(5):
                await asyncio.sleep(0)
            await both(first, batcher.deliver(1, [update(9, 1)]))
            return worker.requests

        assert asyncio.run(run()) == [{0: [1], 1: [1]}]

    def test_what_comes_meanwhile_goes_when_the_answer_is_there(self):
        async def run():
            worker = Worker()
            worker.may_answer.clear()
            batcher = batcher_of(worker, 0, 1)
            first = asyncio.ensure_future(batcher.deliver(0, [update(9, 1)]))
            await asyncio.wait_for(worker.asked.wait(), PATIENCE_S)
            second = asyncio.ensure_future(batcher.deliver(1, [update(9, 1)]))
            await asyncio.sleep(0)
            requests = len(worker.requests)
            worker.may_answer.set()
            await both(first, second)
            return requests, worker.requests

        assert asyncio.run(run()) == (1, [{0: [1]}, {1: [1]}])

    def test_a_request_has_a_bound_in_bytes(self):
        async def run():
            worker, half = Worker(), BATCH_BYTES // 2
            batcher = batcher_of(worker, 0, 1, 2)
            await both(*(batcher.deliver(r, [update(9, r, half)]) for r in range(3)))
            return worker.requests

        assert asyncio.run(run()) == [{0: [0]}, {1: [1]}, {2: [2]}]

    def test_what_is_for_several_counts_once_for_that_bound(self):
        async def run():
            worker, large = Worker(), update(9, 1, BATCH_BYTES - 1_000)
            batcher = batcher_of(worker, 0, 1)
            await both(batcher.deliver(0, [large]), batcher.deliver(1, [large]))
            return worker.requests

        assert asyncio.run(run()) == [{0: [1], 1: [1]}]


class TestWhatComesBack:
    def test_each_learns_what_was_accepted_of_its_own(self):
        async def run():
            worker = Worker(r0=taken(0))
            batcher = batcher_of(worker, 0, 1)
            items = [update(9, 1), update(9, 2)]
            return await both(batcher.deliver(0, items), batcher.deliver(1, items))

        assert asyncio.run(run()) == [0, 2]

    @pytest.mark.parametrize("status", [Answer.UNKNOWN, Answer.REFUSED])
    def test_one_that_is_not_there_fails_alone(self, status):
        async def run():
            worker = Worker(r0={"status": status.value})
            batcher = batcher_of(worker, 0, 1)
            items = [update(9, 1)]
            return await both(batcher.deliver(0, items), batcher.deliver(1, items))

        failed, accepted = asyncio.run(run())

        assert isinstance(failed, OSError)
        assert accepted == 1

    @pytest.mark.parametrize(
        "answer",
        [None, {"status": Answer.REFUSED.value}, {"status": "ok", "answers": []}],
        ids=["none", "refused", "too few"],
    )
    def test_an_answer_that_is_none_fails_all(self, answer):
        class Odd(Worker):
            async def ask(self, items, shares):
                return answer

        async def run():
            batcher = batcher_of(Odd(), 0, 1)
            return await both(*(batcher.deliver(r, [update(9, 1)]) for r in (0, 1)))

        told = asyncio.run(run())

        assert [type(error) for error in told] == [OSError, OSError]

    @pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("pool closed")])
    def test_what_the_request_raises_comes_out_and_the_next_one_goes(self, error):
        class Failing(Worker):
            async def ask(self, items, shares):
                if not self.asked.is_set():
                    self.asked.set()
                    raise error
                return await super().ask(items, shares)

        async def run():
            batcher = batcher_of(Failing(), 0)
            told = await both(batcher.deliver(0, [update(9, 1)]))
            return told, await both(batcher.deliver(0, [update(9, 1)]))

        assert asyncio.run(run()) == ([error], [1])

    def test_a_request_without_an_answer_ends(self):
        async def run():
            worker = Worker()
            worker.may_answer.clear()
            batcher = batcher_of(worker, 0, seconds=0.01)
            return await both(batcher.deliver(0, [update(9, 1)]))

        (error,) = asyncio.run(run())

        assert isinstance(error, TimeoutError)

    def test_who_does_not_wait_any_more_is_not_sent_to(self):
        async def run():
            worker = Worker()
            worker.may_answer.clear()
            batcher = batcher_of(worker, 0, 1)
            first = asyncio.ensure_future(batcher.deliver(0, [update(9, 1)]))
            await asyncio.wait_for(worker.asked.wait(), PATIENCE_S)
            second = asyncio.ensure_future(batcher.deliver(1, [update(9, 1)]))
            await asyncio.sleep(0)
            second.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await second
            worker.may_answer.set()
            await both(first)
            return worker.requests

        assert asyncio.run(run()) == [{0: [1]}]

    def test_the_end_leaves_nobody_waiting(self):
        async def run():
            worker = Worker()
            worker.may_answer.clear()
            batcher = batcher_of(worker, 0, 1)
            waiting = [
                asyncio.ensure_future(batcher.deliver(r, [update(9, 1)]))
                for r in (0, 1)
            ]
            await asyncio.wait_for(worker.asked.wait(), PATIENCE_S)
            waiting.append(asyncio.ensure_future(batcher.deliver(0, [update(9, 2)])))
            await asyncio.sleep(0)
            batcher.end()
            return await both(*waiting)

        told = asyncio.run(run())

        assert [type(error) for error in told] == [asyncio.CancelledError] * 3
