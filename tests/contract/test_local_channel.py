"""What only the channel among threads does; the rest is in its contract."""

import contextlib
import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from daskdl.channel.base import Stopped
from daskdl.channel.leasing import RunSpec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import ChannelSpec
from daskdl.config import Bound
from tests.support.run_states import TIMEOUTS, extents, of_one

SPEC = ChannelSpec(7, 0, 50, 2.0**-24, 2**20, 2**20, TIMEOUTS)


def run_of(replicas=2, **options):
    return LocalRun(
        RunSpec(
            run=7,
            replicas=dict.fromkeys(range(replicas), "here"),
            sizes=extents({"train": ("p",)}),
            seed=None,
            epochs_before=0,
            synchronous=False,
            relay_bytes=0,
            min_replicas=1,
            timeouts=dataclasses.asdict(SPEC.timeouts),
        ),
        **options,
    )


def channel_of(run, replica=0, drops=(), **timeouts):
    bounds = dataclasses.replace(SPEC.timeouts, **timeouts)
    spec = dataclasses.replace(SPEC, replica=replica, timeouts=bounds, drops=drops)
    return LocalChannel(run, spec)


@contextlib.contextmanager
def joined(channel):
    """It joins in a thread of its own, as founders wait for each other."""
    with ThreadPoolExecutor(1) as pool:
        entry = pool.submit(channel.join)
        yield
        entry.result()


def test_a_failure_reaches_those_that_have_not_joined():
    run = run_of()
    early, late = channel_of(run, 0), channel_of(run, 1)

    early.fail({"type": "ReplicaError", "summary": "boom"})

    with pytest.raises(Stopped, match="replica 0 failed: boom"):
        late.join()


def test_one_that_does_not_start_is_named_and_leaves_when_it_comes():
    run = run_of()
    early, late = channel_of(run, join=0.1), channel_of(run, 1)

    with pytest.raises(Stopped) as caught:
        early.join()

    text = str(caught.value)
    assert text.startswith("not all replicas started within 0.1 s (daskdl.timeouts.jo")
    assert "replica 1 on here, which has not joined" in text
    failed, stopped = run.watch(timeout_s=0)
    assert (failed["kind"], failed["type"]) == ("failed", "WaitTimeoutError")
    assert failed["summary"] == stopped["summary"] == text
    early.leave()
    with pytest.raises(Stopped, match="not all replicas started"):
        late.join()


OTHERS = {
    "gather": lambda channel: channel.barrier("end", None),
    "lease": lambda channel: channel.lease("train", 0, [], wait=True),
}


@pytest.mark.parametrize("block", OTHERS.values(), ids=OTHERS)
def test_one_that_says_nothing_while_another_waits_for_it_ends_the_run(block):
    run = run_of()
    channel, silent = channel_of(run, data=0.1, silence=0.1), channel_of(run, 1)
    with joined(silent):
        channel.join()
    assert of_one(silent.lease("train", 0, [])) == (0, "p")

    with pytest.raises(Stopped) as caught:
        block(channel)

    assert re.fullmatch(
        r"no heartbeat for 0\.2 s \(daskdl\.timeouts\.data \+ silence\) of "
        r"replica 1 on here, last seen at step 0, update 0, 0\.\d s ago",
        str(caught.value),
    )
    assert run.watch(timeout_s=0)[0]["type"] == "WaitTimeoutError"
    silent.progress(1)
    with pytest.raises(Stopped):
        silent.check()


class TestPatience:
    """How long one waits for others that have no bound, by a clock of the test's."""

    BOUND = Bound(10, ("data",))

    @pytest.fixture
    def run(self):
        clock = SimpleNamespace(now=100.0)
        run = run_of(2, now=lambda: clock.now)
        run.clock = clock
        channels = [channel_of(run, replica) for replica in range(2)]
        with joined(channels[1]):
            channels[0].join()
        run.channels = channels
        return run

    def test_only_beyond_the_bound_somebody_is_silent(self, run):
        run.clock.now = 109.0
        run.channels[0].progress(1)
        run.clock.now = 110.0
        run.check_heartbeats(self.BOUND)
        assert run.state.stopped is None

        run.clock.now = 110.5
        assert run.patience_s(self.BOUND) == 0.0
        run.check_heartbeats(self.BOUND)

        assert run.state.stopped == (
            "no heartbeat for 10 s (daskdl.timeouts.data) of replica 1 on here, "
            "last seen at step 0, update 0, 10.5 s ago"
        )


def test_leaving_twice_changes_nothing():
    run = run_of()
    channel = channel_of(run)
    channel.leave()
    generation = run.state.members.generation

    channel.leave()

    assert run.state.members.generation == generation
    assert run.here == []
