"""What writes down what goes by in a run: a callback, and a master.

The master trains as GradientSharing does, and sees only what any exchange sees:
the module, and the channel's interface.
"""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from daskdl import Callback, GradientSharing, KeepResidual, TrainingMaster, codec
from daskdl.channel.base import Channel
from daskdl.training.base import Exchange


def vector(module):
    """The trainable parameters, float64."""
    return torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])


def counts_of(update, grid):
    """An update as a dense vector of steps of the grid."""
    if isinstance(update, codec.DenseUpdate):
        return update.counts_N.astype(np.int64)
    dense_N = np.zeros(update.size, np.int64)
    positions = np.abs(update.entries_K.astype(np.int64)) - 1
    dense_N[positions] = np.sign(update.entries_K) * round(update.threshold / grid)
    return dense_N


class Notes(Callback):
    """Writes a line of JSON for each step into a file of its replica."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_step(self, step):
        path = os.path.join(self.folder, f"{step.replica}.jsonl")
        line = {
            **step._asdict(),
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self):
        lines = []
        for name in sorted(os.listdir(self.folder)):
            with open(os.path.join(self.folder, name)) as file:
                lines += [json.loads(line) for line in file]
        return lines


class RecordingChannel:
    """Passes everything on; keeps what was published and what was received."""

    def __init__(self, inner: Channel, copies: int = 1) -> None:
        self._inner = inner
        self._copies = copies
        self.sent = []
        self.received = []
        self.folded = []
        self.leads = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def publish(self, stamp, frame):
        accepted = self._inner.publish(stamp, frame)
        if accepted:
            self.sent.append(codec.decode(frame.tobytes()))
            for _ in range(self._copies - 1):  # as a retried request would
                self._inner.publish(stamp, frame)
        return accepted

    def receive(self, up_to_step=None):
        arrived = self._inner.receive(up_to_step)
        self.received.extend(arrived.updates)
        if arrived.folded_N is not None:
            self.folded.append(arrived.folded_N.astype(np.int64))
        return arrived

    def take_all(self):
        arrived, received = self._inner.take_all()
        self.received.extend(arrived.updates)
        if arrived.folded_N is not None:
            self.folded.append(arrived.folded_N.astype(np.int64))
        return arrived, received

    def wait_for_others(self, step, epoch, max_staleness):
        self._inner.wait_for_others(step, epoch, max_staleness)
        self.leads.append(self._inner.lead(step, epoch))


class Recording(Exchange):
    """Checks conservation after every step, and saves its record after every epoch."""

    def __init__(self, inner, seat, channel, folder):
        self._inner = inner
        self._seat = seat
        self._channel = channel
        self._folder = Path(folder)
        self._start = vector(seat.module)
        self._progress = torch.zeros_like(self._start)
        self._applied = 0
        self._grid = 2.0**-24

    def __getattr__(self, name):
        return getattr(self._inner, name)

    @property
    def learning_rate_scale(self):
        return self._inner.learning_rate_scale

    def before_step(self, epoch):
        self._inner.before_step(epoch)
        self._check()
        self._before = vector(self._seat.module)

    def after_step(self, epoch):
        self._progress += vector(self._seat.module) - self._before
        self._inner.after_step(epoch)
        self._check()

    def _others(self):
        channel = self._channel
        total = sum((counts_of(u, self._grid) for u in channel.received), 0)
        return total + sum(channel.folded, 0)

    def _check(self):
        """Eager: local = start + own progress + what others have sent."""
        expected = self._start + self._progress
        others = self._others()
        if not isinstance(others, int):
            expected = expected + torch.from_numpy(others) * self._grid
        # One rounding of float32 for each move of a parameter of size about 1.
        torch.testing.assert_close(
            vector(self._seat.module), expected, rtol=0, atol=2e-6
        )

    def end_epoch(self, epoch, examples):
        self._inner.end_epoch(epoch, examples)
        self._check()
        channel = self._channel
        with self._inner.showing_agreed():
            shared = vector(self._seat.module).numpy()
        own = sum((counts_of(u, self._grid) for u in channel.sent), 0)
        np.savez(
            self._folder / f"{self._seat.replica}-{epoch}.npz",
            shared=shared,
            expected=self._start.numpy() + (own + self._others()) * self._grid,
            progress=self._progress.numpy(),
            start=self._start.numpy(),
            published=[u.stamp[1:3] for u in channel.sent],
            received=[u.stamp[1:3] for u in channel.received],
            folds=len(channel.folded),
            leads=channel.leads,
        )

    # Abstract methods are looked up on the class, not by __getattr__.
    def showing_agreed(self):
        return self._inner.showing_agreed()

    def digest(self):
        return self._inner.digest()

    def statistics(self):
        return self._inner.statistics()

    def rest(self, epoch):
        self._inner.rest(epoch)

    def opened(self):
        self._inner = self._inner.opened()  # rounds the module to the grid
        return self

    def snapshot(self):
        return self._inner.snapshot()

    def hand_over(self):
        self._inner.hand_over()
        # A step the stop fell into has moved the module, and is handed over too.
        np.savez(
            self._folder / f"{self._seat.replica}-left.npz",
            progress=self._progress.numpy(),
            others=np.asarray(self._others()),
            local=vector(self._seat.module).numpy(),
        )

    def final(self):
        return self._inner.final()

    def agreed(self):
        return self._inner.agreed()

    def outcome(self):
        return self._inner.outcome()


@dataclass(frozen=True)
class Recorded(TrainingMaster):
    """GradientSharing with a record in a folder.

    Args:
        folder: Gets ``{replica}-{epoch}.npz``.
        inner: What trains.
        copies: How often each update is published.
    """

    folder: str
    inner: GradientSharing = field(
        default_factory=lambda: GradientSharing(residual=KeepResidual())
    )
    copies: int = 1

    @property
    def replicas_per_worker(self):
        return self.inner.replicas_per_worker

    @property
    def min_replicas(self):
        return self.inner.min_replicas

    @property
    def synchronous(self):
        return self.inner.synchronous

    def attach(self, seat):
        channel = RecordingChannel(seat.channel, self.copies)
        inner = self.inner.attach(replace(seat, channel=channel))
        return Recording(inner, seat, channel, self.folder)


def executed(client):
    """How many tasks each worker has done so far."""
    return client.run(lambda dask_worker: dask_worker.state.executed_count)


def records(folder, epoch):
    """The records of all replicas at the end of an epoch, by replica."""
    return {
        int(path.name.split("-")[0]): dict(np.load(path))
        for path in sorted(Path(folder).glob(f"*-{epoch}.npz"))
    }
