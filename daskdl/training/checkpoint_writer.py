"""A replica's parts of checkpoints: copied, and written while training goes on."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from daskdl.channel.base import Channel, Gathered
from daskdl.checkpoints.parts import COMMON, Copy, Part, Stamp, of_replica
from daskdl.checkpoints.plan import CheckpointPlan
from daskdl.errors import SaveError
from daskdl.timeouts import Timeouts
from daskdl.training.background import awaited, begun


class Copyable(NamedTuple):
    """What one replica has for a checkpoint; tensors may be those that go on changing.

    All of it is plain values, and tensors but for what is `said`.
    """

    said: Mapping[str, Any]  # of the common part, read without the rest
    common: Mapping[str, Any]  # the same for all replicas
    own: Mapping[str, Any]


class CheckpointWriter:
    """Writes the parts of one replica. At most one copy waits to be written.

    Args:
        plan: Of the run.
        replica: The number of this one.
        channel: Its end of the run.
        timeouts: Bounds on waiting.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        replica: int,
        channel: Channel,
        timeouts: Timeouts,
    ) -> None:
        self._plan = plan
        self._replica = replica
        self._channel = channel
        self._bound = timeouts.bound("data")
        self._series = plan.series
        self._written = -1  # number of the last one
        self._members: tuple[int, ...] = ()  # that had a part in the last one
        self._writing: tuple[int, Future[None]] | None = None
        self._copies: dict[str, Copy] = {}  # of the last one, by part

    def written(self) -> int:
        """Number of the last checkpoint of which this replica's part is there, or -1.

        Raises:
            SaveError: If one could not be written.
        """
        if self._writing is not None and self._writing[1].done():
            self._written, done = self._writing
            self._writing = None
            done.result()
        return self._written

    def finish(self) -> None:
        """Wait until all is written that was begun.

        Raises:
            SaveError: If it could not be written.
            WaitTimeoutError: If it takes too long.
        """
        if self._writing is not None:
            number, writing = self._writing
            what = f"writing to {self._series.folder(number).url}"
            awaited(self._channel, writing, self._bound, what)
            self.written()

    def begin(self, taken: int, gathered: Gathered, what: Copyable) -> None:
        """Copy what there is, and begin to write it; nothing is being written.

        Args:
            taken: Checkpoints of this run before.
            gathered: What all replicas said when they met: they take part.
            what: Of this replica.
        """
        notes, stamp = gathered.notes, self._plan.stamp(taken)
        members = tuple(sorted(notes.keys() - gathered.gone.keys()))
        complete = {note["written"] for note in notes.values()} == {stamp.number - 1}
        expected = complete and set(self._members) <= set(members)
        self._members = members
        # One that came later may not know all rows of the history.
        first = max(members, key=lambda replica: notes[replica]["rows"])
        self._copy(stamp, taken, what, of_all=self._replica == first)

        def write() -> None:
            self._write(stamp.number, expected)

        name = f"daskdl-checkpoint-{self._replica}"
        self._writing = stamp.number, begun(write, name)

    def _copy(self, stamp: Stamp, taken: int, what: Copyable, *, of_all: bool) -> None:
        """Into the memory of the last copy, if there is as much of it as is needed."""
        used, store = self._copies, self._series.folder(stamp.number)
        own = of_replica(self._replica)
        part = Part(store, own)
        self._copies = {own: part.copied(stamp, {}, plain(what.own), used.get(own))}
        if of_all:
            count = self._plan.before + taken + 1
            said = {**what.said, "members": list(self._members), "count": count}
            said, common = plain(said), plain(what.common)
            copy = Part(store, COMMON).copied(stamp, said, common, used.get(COMMON))
            self._copies[COMMON] = copy

    # thread of its own

    def _write(self, number: int, expected: bool) -> None:
        """Write the copies, the common part last; the training thread leaves them."""
        store = self._series.folder(number)
        for name, copy in self._copies.items():
            if name == COMMON and expected:
                self._check(number - 1)
            Part(store, name).write(copy)
        if COMMON in self._copies:
            self._plan.prune()

    def _check(self, number: int) -> None:
        """All have said that they have written it."""
        if self._series.whole(number) is None:
            raise SaveError(
                "all replicas have written their parts of "
                f"{self._series.folder(number).url}, and they are not all there; it "
                "has to be the same place for all workers"
            )


def plain(value: Any) -> Any:
    """Plain values with tensors in the place of arrays.

    Example:
        >>> plain({"a": [np.zeros(2), 1.5]})
        {'a': [tensor([0., 0.], dtype=torch.float64), 1.5]}
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return type(value)({key: plain(one) for key, one in value.items()})
    if type(value) in (list, tuple):
        return type(value)(plain(one) for one in value)
    return value
