"""A callback and a master that record what replicas publish, receive and agree on.

The master trains as GradientSharing does, and uses only what every exchange has:
the module, and the channel's interface.
"""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from distributed import get_worker
from distributed.utils_test import poll_for

from daskdl import Callback, GradientSharing, KeepResidual, TrainingMaster, codec
from daskdl.channel.base import Channel
from daskdl.training.base import Exchange
from daskdl.training.gradient_sharing import GradientSharingExchange
from daskdl.training.state import decoded
from tests.support.problems import rows, trainer


def peak_bytes():
    """The most memory of this program, in bytes.

    Not `resource.getrusage`: what that tells starts at what the process had that this
    one was started from, which in a long test session is more than a worker needs.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmHWM")


GRID = 2.0**-24  # of the runs here


def vector(module):
    """The trainable parameters, float64, on the CPU."""
    return torch.cat(
        [p.detach().double().reshape(-1) for p in module.parameters()]
    ).cpu()


def parameters_in_step(device, apply="eager"):
    """The parameters that two replicas in step end with, which depend on nothing else.

    Args:
        device: Of both replicas.
        apply: Of the master.
    """
    master = GradientSharing(replicas_per_worker=2, max_staleness=0, apply=apply)
    fitted = trainer(False, master=master, device=device)
    fitted.fit(*rows(96), epochs=2, batch_size=8)
    assert fitted.history_[-1]["sent_bytes"] > 0
    return vector(fitted.model_)


def delivered(trainer, *data):
    """Its parameters with what replicas had not sent; float64.

    A fit of one replica that moves nothing adds it.
    """
    trainer.client, trainer.callbacks, trainer.scheduler = False, [], None
    trainer.master = GradientSharing(residual=KeepResidual(), update_scale="sum")
    trainer.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    trainer.fit(*(data or rows(64)))
    return vector(trainer.model_)


def counts_of(update, grid):
    """An update as a dense vector of steps of the grid."""
    if isinstance(update, codec.DenseUpdate):
        return update.counts_N.astype(np.int64) * round(update.grid / grid)
    dense_N = np.zeros(update.size, np.int64)
    positions = np.abs(update.entries_K.astype(np.int64)) - 1
    dense_N[positions] = update.quanta_K * round(update.threshold / grid)
    return dense_N


class Notes(Callback):
    """Writes a line of JSON for each step into a file of its replica."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_step_end(self, step):
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
    """Passes everything on; keeps what was published and what was received.

    Attributes:
        sent: Origin and sequence of each update that was accepted.
        kinds: Of each of these, as a number.
        sent_N: Their sum, steps of the grid.
        kept_N: What momentum has kept of it.
        received: Origin and sequence of each update that arrived unfolded.
        received_N: The sum of all that arrived.
        folds: How often updates arrived folded into one vector.
        states: How often another replica's state was taken instead of updates.
        leads: How far ahead this replica was after each wait for the others.
    """

    def __init__(self, inner: Channel, copies: int = 1, momentum: float = 0.0) -> None:
        self._inner = inner
        self._momentum = momentum
        self.kept_N = 0
        self._copies = copies
        self.sent = []
        self.kinds = []
        self.sent_N = 0
        self.received = []
        self.received_N = 0
        self.folds = 0
        self.states = 0
        self.leads = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def publish(self, encode, step, **options):
        frame = self._inner.publish(encode, step, **options)
        if frame is not None:
            update = codec.decode(frame.tobytes())
            self.sent.append(update.stamp[1:3])
            self.kinds.append(int(frame[5]))
            counts_N = counts_of(update, GRID)
            self.sent_N = self.sent_N + counts_N
            if not options.get("force"):  # else the replica leaves
                self.kept_N = self.kept_N + self._momentum * counts_N
            for _ in range(self._copies - 1):  # as a retried request would
                progress = self._inner._inbox.progress
                self._inner._inbox.progress = progress._replace(
                    sequence=progress.sequence - 1
                )
                self._inner.publish(lambda _: frame, step, **options)
        return frame

    def drain(self, up_to_step=None):
        return self._note(self._inner.drain(up_to_step))

    def drain_for_snapshot(self):
        drained, received = self._inner.drain_for_snapshot()
        return self._note(drained), received

    def _note(self, arrived):
        for update in arrived.updates:
            self.received.append(update.stamp[1:3])
            self.received_N = self.received_N + counts_of(update, GRID)
        if arrived.folded_N is not None:
            self.folds += 1
            self.received_N = self.received_N + arrived.folded_N.astype(np.int64)
        return arrived

    def agree(self, key, published, gone, load):
        def note(snapshot):
            load(snapshot)
            self.states += 1
            (counts,) = decoded(snapshot).common["exchange"]["compressor"]["shared"]
            counts_N = counts.numpy().astype(np.int64)
            self.received_N = counts_N - self.start_N - self.sent_N

        self._inner.agree(key, published, gone, note)

    def wait_for_peers(self, step, interval, max_staleness):
        lead = self._inner.wait_for_peers(step, interval, max_staleness)
        if max_staleness is not None:
            self.leads.append(lead)
        return lead


class Recording(Exchange):
    """Checks conservation after every step, and saves its record after every epoch."""

    kind = GradientSharingExchange.kind

    def __init__(self, inner, seat, channel, folder, atol):
        self._inner = inner
        self._seat = seat
        self._channel = channel
        self._folder = Path(folder)
        self._atol = atol
        self._start = vector(seat.module)
        self._progress = torch.zeros_like(self._start)
        self._ended = None  # the epoch that has ended, until its model is copied
        self._begin()

    def _begin(self):
        self._carried = self._progress.clone()
        self._channel.start_N = np.rint(self._start.numpy() / GRID).astype(np.int64)

    def load_(self, common, per_replica):
        """What was agreed on is the start, and what was not sent is progress."""
        self._inner.load_(common, per_replica)
        local = vector(self._seat.module)
        with self._inner.showing_agreed():
            self._start = vector(self._seat.module)
        self._progress = (local - self._start) / self._weight()
        self._begin()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    @property
    def learning_rate_scale(self):
        return self._inner.learning_rate_scale

    @property
    def rate_factor(self):
        return self._inner.rate_factor

    @property
    def exchanged(self):
        return self._inner.exchanged

    @property
    def averages_optimizer(self):
        return self._inner.averages_optimizer

    def before_step(self, epoch):
        self._inner.before_step(epoch)
        self._check()
        self._before = vector(self._seat.module)

    def after_step(self, epoch, examples):
        moved = vector(self._seat.module) - self._before
        self._progress += moved / self._weight()
        self._inner.after_step(epoch, examples)
        self._check()

    def _check(self):
        """Eager: local = start + what all have sent + the weighted residual."""
        channel = self._channel
        sent, others = channel.sent_N * GRID, channel.received_N * GRID
        kept = torch.as_tensor(channel.kept_N * GRID)
        residual = self._progress + kept - torch.as_tensor(sent)
        shared = self._start + torch.as_tensor(sent + others)
        expected = shared + self._weight() * residual
        local = vector(self._seat.module)
        # After every step: assert_close takes sixteen times as long, to say where.
        if not (local - expected).abs().max() <= self._atol:
            torch.testing.assert_close(local, expected, rtol=0, atol=self._atol)

    def _weight(self):
        return self._inner.learning_rate_scale / self._inner.update_scale

    def sync(self, epoch, examples, *, ended):
        self._inner.sync(epoch, examples, ended=ended)
        self._ended = epoch if ended else None

    def _record(self, epoch):
        self._check()
        channel = self._channel
        with self._inner.showing_agreed():
            shared = vector(self._seat.module).numpy()
        total_N = channel.sent_N + channel.received_N
        written = self._folder / f"{self._seat.replica}-{epoch}.npz"
        partial = written.with_name(f"partial-{written.name}")  # it may be killed
        np.savez(
            partial,
            shared=shared,
            expected=self._start.numpy() + total_N * GRID,
            progress=self._progress.numpy() + channel.kept_N * GRID,
            start=self._start.numpy(),
            carried=self._carried.numpy(),
            published=channel.sent,
            received=channel.received,
            kinds=channel.kinds,
            folds=channel.folds,
            states=channel.states,
            leads=channel.leads,
            peak_bytes=peak_bytes(),
        )
        partial.rename(written)

    # What the base class has is looked up there, not by __getattr__.
    def showing_agreed(self):
        return self._inner.showing_agreed()

    def agreed(self):
        ended, self._ended = self._ended, None
        if ended is not None:
            self._record(ended)
        return self._inner.agreed()

    def stats(self):
        return self._inner.stats()

    def step_stats(self):
        return self._inner.step_stats()

    def admit(self):
        return self._inner.admit()

    def state(self):
        return self._inner.state()

    def leave(self):
        self._inner.leave()
        # A step the stop fell into has moved the module, and is handed over too.
        np.savez(
            self._folder / f"{self._seat.replica}-left.npz",
            progress=self._progress.numpy() + self._channel.kept_N * GRID,
            others=np.asarray(self._channel.received_N),
            local=vector(self._seat.module).numpy(),
        )

    def carried(self, *, ended):
        return self._inner.carried(ended=ended)


@dataclass(frozen=True)
class Recorded(TrainingMaster):
    """GradientSharing with a record in a folder.

    Args:
        folder: Gets ``{replica}-{epoch}.npz``.
        inner: What trains.
        copies: How often each update is published.
        atol: Of the check: one rounding of float32 for each move of a parameter of
            size about 1.
    """

    folder: str
    inner: GradientSharing = field(
        default_factory=lambda: GradientSharing(residual=KeepResidual())
    )
    copies: int = 1
    atol: float = 2e-6
    resumes: ClassVar = GradientSharing.resumes

    @property
    def replicas_per_worker(self):
        return self.inner.replicas_per_worker

    @property
    def min_replicas(self):
        return self.inner.min_replicas

    @property
    def fan_out(self):
        return self.inner.fan_out

    def routing_for(self, workers):
        return self.inner.routing_for(workers)

    @property
    def synchronous(self):
        return self.inner.synchronous

    def attach(self, seat):
        channel = RecordingChannel(seat.channel, self.copies, self.inner.momentum)
        inner = self.inner.attach(replace(seat, channel=channel))
        return Recording(inner, seat, channel, self.folder, self.atol)


def executed(client):
    """How many tasks each worker has done so far."""
    return client.run(lambda dask_worker: dask_worker.state.executed_count)


@dataclass
class MeetInPass:
    """A transform of a pass over data: waits until so many workers have applied it.

    Which worker gets a part depends on how long the parts before it take.
    """

    folder: Path
    workers: int

    def __call__(self, batch):
        try:
            worker = get_worker()
        except ValueError:  # the client tries it, too
            return batch
        (self.folder / worker.id).touch()
        poll_for(lambda: len(list(self.folder.iterdir())) == self.workers, 60)
        return batch


def records(folder, epoch):
    """The records of all replicas at the end of an epoch, by replica."""
    return {
        int(path.name.split("-")[0]): dict(np.load(path))
        for path in sorted(Path(folder).glob(f"[0-9]*-{epoch}.npz"))
    }


ATOL = 2e-5  # several hundred moves, each rounded to float32 at a size of about 1


def check_barrier(ends):
    """All who were at the end of an epoch have the same, and each update once."""
    assert ends
    first, *others = ends.values()
    for later in others:
        np.testing.assert_array_equal(later["shared"], first["shared"])
    founders = []
    for replica, end in ends.items():
        # What is in it is the sum of what the log says, and nothing else.
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=ATOL)
        if end["states"]:  # it shares another's vector, which is checked there
            continue
        updates = [tuple(u) for u in (*end["published"], *end["received"])]
        assert len(set(updates)) == len(updates), f"replica {replica} has some twice"
        assert not end["folds"], "a fold hides which updates it was made of"
        if np.array_equal(end["start"], first["start"]):
            founders.append(set(updates))
    assert all(updates == founders[0] for updates in founders[1:])
