"""A run's plan, its state and queued messages, and an inbox filled with updates."""

import dataclasses

import numpy as np

from daskdl.channel.inbox import Inbox
from daskdl.channel.leasing import PartitionSizes, RunSpec
from daskdl.channel.protocol import MESSAGE_BYTES, ChannelSpec, Message, MessageKind
from daskdl.channel.run_state import RunState
from daskdl.channel.transport import Outbox
from daskdl.codec import Kind, SparseUpdate, Stamp
from daskdl.config import Timeouts

EACH = 100 + MESSAGE_BYTES
TIMEOUTS = Timeouts(join=60, request=30, silence=10, stop=10, rejoin=300, data=600)
KEYS = {"train": ("p-0", "p-1", "p-2", "p-3"), "validation": ("v-0", "v-1")}
GRID = 2.0**-24
SIZE = 50
SPEC = ChannelSpec(7, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS, secret=2**40 + 7)


def plan_of(replicas=3, keys=KEYS, timeouts=TIMEOUTS, **options):
    """The plan of a run whose parts have one row each.

    Args:
        replicas: How many, or the worker of each.
        keys: Of the parts, by phase.
        timeouts: Of the run.
        options: Other fields of the plan.
    """
    if isinstance(replicas, int):
        replicas = {r: f"tcp://worker-{r}" for r in range(replicas)}
    sizes = {
        phase: PartitionSizes(
            (1,) * len(phase_keys), tuple(phase_keys), step_rows=1, lease_rows=1
        )
        for phase, phase_keys in keys.items()
    }
    defaults = {
        "run": SPEC.run,
        "secret": SPEC.secret,
        "seed": None,
        "epochs_before": 0,
        "synchronous": False,
        "relay_bytes": 10 * EACH,
        "min_replicas": 1,
        "timeouts": dataclasses.asdict(timeouts),
    }
    return RunSpec(replicas=replicas, sizes=sizes, **{**defaults, **options})


def joined(replicas=3, now=100.0, **options):
    state = RunState(plan_of(replicas, **options))
    for replica in state.spec.replicas:
        state.join(replica, now, Outbox(state.spec.relay_bytes))
    for box in state.outboxes.values():
        box.drop(len(box))  # the memberships
    return state


def update(origin, sequence, step=0, nbytes=100):
    kind = MessageKind.UPDATE
    return Message(kind, origin, sequence, step, nbytes, f"frame {origin} {sequence}")


def queued(state, replica, kind=None):
    """The messages in the queue to a replica; by default all but memberships."""
    messages = state.outboxes[replica].head(10**9)
    memberships = {MessageKind.MEMBERS, MessageKind.MEMBER}
    wanted = {kind} if kind else set(MessageKind) - memberships
    return [message for message in messages if message.kind in wanted]


def sparse(origin, sequence, entries, step=None):
    stamp = Stamp(SPEC.run, origin, sequence, sequence if step is None else step)
    entries_K = np.array(entries, np.int32)
    entries_K.flags.writeable = False  # as decode may return them
    return SparseUpdate(stamp, Kind.RAW32, SIZE, GRID, entries_K)


def item_of(update, nbytes=64):
    stamp = update.stamp
    kind = MessageKind.UPDATE
    return Message(kind, stamp.origin, stamp.sequence, stamp.step, nbytes)


def control(kind, origin=0, step=0, payload=None, sequence=0):
    return Message(kind, origin, sequence, step, 0, payload)


def put(inbox, origin, sequence, step=None):
    """Deliver an update of one entry; say whether it was taken."""
    update = sparse(origin, sequence, [1], step)
    return inbox.put(item_of(update), update)


def filled(*keys, limit_bytes=10**9, **options):
    """An inbox that has received updates, by origin and sequence number."""
    inbox = Inbox(SIZE, GRID, limit_bytes, **options)
    for key in keys:
        assert put(inbox, *key)
    return inbox
