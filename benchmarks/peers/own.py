"""daskdl: `fit` on a Dask worker of one thread for each host.

Scheduler and client are on the host of rank 0, beside its worker. The data are files
that all workers reach, as the other contestants make theirs from what is on each host.
Dask's own housekeeping is as docs/tuning.md has it for workers without a core to spare.
"""

import contextlib
import functools
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import dask
import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import Tensor, nn

import daskdl
from benchmarks.peers.loop import Arguments, Gauge, Meeting, meet, parser, put, read
from benchmarks.work import score

PARTS = 16  # files of the rows to learn from
START_S = 120

HOUSEKEEPING = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.monitor-interval": "1s",
}

WAYS: dict[str, Any] = {
    "sharing": lambda every: daskdl.GradientSharing(exchange_every=every),
    "averaging": lambda every: daskdl.ParameterAveraging(frequency=every),
}


class EnoughError(Exception):
    """All have reported; nothing went wrong."""


class Ends(daskdl.Callback):
    """On the client: ends the fit when all that count have reported."""

    def __init__(self, own: Arguments, meeting: Meeting) -> None:
        wanted = own.world if own.target is None else 1
        self._names = [f"report {rank}" for rank in range(wanted)]
        self._meeting = meeting

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        if all(map(self._meeting.is_said, self._names)):
            raise EnoughError


class Counts(daskdl.Callback):
    """On the workers: counts the steps of a replica with the gauge of all contestants.

    Each replica has a copy of its own.
    """

    def __init__(self, own: Arguments) -> None:
        self._own = own
        self._gauge: Gauge | None = None

    def on_epoch_begin(self, epoch: daskdl.EpochBegin) -> None:
        if self._gauge is None:
            self._gauge = self._begun(epoch.replica)

    def on_step_end(self, step: daskdl.Step) -> None:
        assert self._gauge is not None
        self._gauge.goes_on(step.examples)

    def _begun(self, replica: int) -> Gauge:
        own = replace(self._own, rank=replica)
        meeting = Meeting(own.address, own.port, own.world, hosts=False)
        *_, x, y = map(torch.from_numpy, own.task.split())
        # Of the last step: no model but the replica's own is trained by this thread.
        gauge = Gauge(
            own, meeting, None, lambda: score(own.task, _trained[get_ident()], x, y)
        )
        gauge.begin()
        return gauge


_trained: dict[int, nn.Module] = {}  # by training thread


def step(loss: nn.Module, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """That of every other contestant; who wants to score the model finds it."""
    _trained[get_ident()] = model
    x, y = batch
    found: Tensor = loss(model(x), y)
    return found


def environment() -> dict[str, str]:
    """This process's, with Dask's housekeeping as a shell says it."""
    said = {
        f"DASK_{key}".upper().replace(".", "__"): str(value)
        for key, value in HOUSEKEEPING.items()
    }
    return {**os.environ, **said}


@contextlib.contextmanager
def worker(own: Arguments) -> Iterator[subprocess.Popen[bytes]]:
    """This host's, as `dask worker` starts it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distributed.cli.dask_worker"]
        command += [f"tcp://{own.address}:{own.port + 1}", "--nthreads=1"]
        command += [f"--host={own.own}", f"--local-directory={folder}"]
        command += ["--no-dashboard", f"--death-timeout={START_S}"]
        log = Path(folder, "log")
        with (
            log.open("wb") as file,
            subprocess.Popen(command, stderr=file, env=environment()) as process,
        ):
            try:
                yield process
            finally:
                process.terminate()


def files(own: Arguments, folder: Path) -> str:
    """The rows to learn from, in parts; where they are."""
    x, y, *_ = own.task.split()
    for part in range(PARTS):
        np.save(folder / f"{part}.x.npy", x[part::PARTS])
        np.save(folder / f"{part}.y.npy", y[part::PARTS])
    return f"{folder}/*.x.npy"


def mapped(file: Any) -> tuple[np.ndarray, np.ndarray]:
    """A part, which stays in the system's memory, where the others have theirs."""
    x = np.load(file.name, mmap_mode="r")
    return x, np.load(file.name.replace(".x.", ".y."))


def fit(
    own: Arguments, client: Client, meeting: Meeting, master: Any
) -> daskdl.StepTable:
    """Train until all that count have reported; a sample of the steps."""
    trainer = daskdl.Trainer(
        own.task.model,
        optimizer=own.rule(),
        step=functools.partial(step, own.task.loss),
        master=master,
        client=client,
        callbacks=[Counts(own), Ends(own, meeting)],
        seed=own.seed,
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EnoughError):
        trainer.fit(
            files(own, Path(folder)),
            epochs=10**6,
            batch_size=own.task.batch_size,
            loader=mapped,
        )
    return trainer.history_.steps


def parts(steps: daskdl.StepTable) -> dict[str, float]:
    """Milliseconds of a step, and of what is not computing, mean of the later half."""
    half = max(row["step"] for row in steps) / 2
    later = [row for row in steps if row["step"] > half]
    names = ("step_s", "encode_s", "apply_s", "wait_s")
    found = {
        name[:-2] + "_ms": 1e3 * float(np.mean([row[name] for row in later]))
        for name in names
    }
    return {**found, "density": float(np.nanmean([row["density"] for row in later]))}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--way", choices=WAYS, default="sharing")
    made.add_argument("--every", type=int, default=1, help="steps between exchanges")
    own, more = read(made)
    if own.rank > 0:
        with worker(own) as process:
            process.wait()
        return
    meeting = meet(own)
    with (
        dask.config.set(HOUSEKEEPING),
        LocalCluster(
            n_workers=0,
            host=own.own,
            scheduler_port=own.port + 1,
            protocol="tcp",
            dashboard_address=":0",
            silence_logs=logging.ERROR,
        ) as cluster,
        worker(own),
        Client(cluster) as client,
    ):
        client.wait_for_workers(own.world, timeout=START_S)
        steps = fit(own, client, meeting, WAYS[more.way](more.every))
        put(own, meeting, parts=parts(steps))


if __name__ == "__main__":
    main()
