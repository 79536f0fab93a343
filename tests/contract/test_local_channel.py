"""What only the channel among threads does; the rest is in its contract."""

import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from daskdl.channel.base import Stopped
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.config import Bound
from tests.support.run_states import SPEC, TIMEOUTS, plan_of


def run_of(**options):
    return LocalRun(plan_of(2, {"train": ("p",)}), **options)


def channel_of(run, replica=0, **timeouts):
    bounds = dataclasses.replace(TIMEOUTS, **timeouts)
    spec = dataclasses.replace(SPEC, replica=replica, timeouts=bounds)
    return LocalChannel(run, spec)


def join(*channels):
    """Join together: initial replicas wait for each other."""
    with ThreadPoolExecutor(len(channels)) as pool:
        list(pool.map(LocalChannel.join, channels))


def test_a_failure_reaches_replicas_that_have_not_joined():
    run = run_of()
    early, late = channel_of(run, 0), channel_of(run, 1)

    early.fail({"type": "ReplicaError", "summary": "boom"})

    with pytest.raises(Stopped, match="replica 0 failed: boom"):
        late.join()


@pytest.mark.parametrize(
    "block",
    [
        lambda channel: channel.barrier("end", None),
        lambda channel: channel.lease("train", 0, [], wait=True),
    ],
    ids=["barrier", "lease"],
)
def test_a_replica_that_is_silent_while_another_waits_for_it_ends_the_run(block):
    run = run_of()
    channel, silent = channel_of(run, data=0.1, silence=0.1), channel_of(run, 1)
    join(channel, silent)
    silent.lease("train", 0, [])
    silent.count_steps(375)

    with pytest.raises(Stopped) as caught:
        block(channel)

    assert re.fullmatch(
        r"no heartbeat for 0\.2 s \(daskdl\.timeouts\.data \+ silence\) of "
        r"replica 1 on tcp://worker-1, last seen at step 375, update 0, 0\.\d s ago",
        str(caught.value),
    )
    assert run.watch(timeout_s=0)[0]["type"] == "WaitTimeoutError"
    silent.progress(1)
    with pytest.raises(Stopped):
        silent.check()


def test_a_replica_is_silent_only_beyond_the_bound():
    now, bound = 100.0, Bound(10, ("data",))
    run = run_of(clock=SimpleNamespace(now=lambda: now, condition=threading.Condition))
    channels = [channel_of(run, replica) for replica in range(2)]
    join(*channels)

    now = 109.0
    channels[0].progress(1)
    now = 110.0
    run.check_heartbeats(bound)
    assert run.state.stopped is None

    now = 110.5
    assert run.patience_s(bound) == 0.0
    run.check_heartbeats(bound)
    assert run.state.stopped.startswith("no heartbeat for 10 s (daskdl.timeouts.data)")


def test_leaving_twice_changes_nothing():
    run = run_of()
    channel = channel_of(run)
    channel.leave()
    generation = run.state.members.generation

    channel.leave()

    assert run.state.members.generation == generation
    assert run.state.members.present == []
