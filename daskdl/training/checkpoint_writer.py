"""A replica's parts of checkpoints: copied, and written while training goes on."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daskdl.channel.base import Channel, Gathered
from daskdl.checkpoints.parts import COMMON, Part, of_replica
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
        count = self._plan.before + taken + 1
        said = {**copied(what.said), "members": list(members), "count": count}
        # One that came later may not know all rows of the history.
        first = max(members, key=lambda replica: notes[replica]["rows"])
        common = copied(what.common) if self._replica == first else None
        own = copied(what.own)
        complete = {note["written"] for note in notes.values()} == {stamp.number - 1}
        expected = complete and set(self._members) <= set(members)
        self._members = members

        def write() -> None:
            store = self._series.folder(stamp.number)
            Part(store, of_replica(self._replica)).write(stamp, {}, own)
            if common is None:
                return
            if expected:
                self._check(stamp.number - 1)
            Part(store, COMMON).write(stamp, said, common)
            self._plan.prune()

        name = f"daskdl-checkpoint-{self._replica}"
        self._writing = stamp.number, begun(write, name)

    def _check(self, number: int) -> None:
        """All have said that they have written it."""
        if self._series.whole(number) is None:
            raise SaveError(
                "all replicas have written their parts of "
                f"{self._series.folder(number).url}, and they are not all there; it "
                "has to be the same place for all workers"
            )


def copied(value: Any) -> Any:
    """Plain values with copies of their tensors and arrays, as tensors on the CPU.

    Example:
        >>> weight = torch.zeros(2)
        >>> copy = copied({"a": [weight, 1.5]})
        >>> _ = weight.add_(1)
        >>> copy
        {'a': [tensor([0., 0.]), 1.5]}
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return type(value)({key: copied(one) for key, one in value.items()})
    if type(value) in (list, tuple):
        return type(value)(copied(one) for one in value)
    return value
