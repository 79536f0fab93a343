"""daskdl: `fit` on a Dask worker of one thread per host.

Scheduler and client run on the host of rank 0, beside its worker. The data are files
that all workers reach. A worker has imported what it needs when it connects, and has no
nanny. Dask's housekeeping is reduced as docs/tuning.md recommends for workers without a
core to spare.
"""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
from distributed import Client, LocalCluster
from distributed.cli import dask_worker

import daskdl
from benchmarks.peers import agreed
from benchmarks.peers.loop import Arguments, Gauge, Meeting, parser, print_summary, read

PARTS = 16  # files of the rows to learn from
TESTS = "tests.npz"
START_S = 120
HOUSEKEEPING = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.monitor-interval": "1s",
}
WAYS: dict[str, Any] = {
    "sharing": lambda every, momentum: agreed.Sharing(
        exchange_every=every or "auto", momentum=momentum
    ),
    "averaging": lambda every, momentum: agreed.Averaging(frequency=every),
}


class EnoughError(Exception):
    """All replicas have reported."""


class Ends(daskdl.Callback):
    """On the client: ends the fit when all replicas that count have reported."""

    def __init__(self, arguments: Arguments, meeting: Meeting) -> None:
        wanted = arguments.world if arguments.target is None else 1
        self._names = [f"report {rank}" for rank in range(wanted)]
        self._meeting = meeting

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        if all(map(self._meeting.has, self._names)):
            raise EnoughError


class Counts(daskdl.Callback):
    """On the workers: counts the steps of a replica, as every other contestant does."""

    def __init__(self, arguments: Arguments, folder: str) -> None:
        self._arguments = arguments
        self._tests = Path(folder, TESTS)
        self._gauge: Gauge | None = None

    def on_epoch_begin(self, epoch: daskdl.EpochBegin) -> None:
        if self._gauge is None:
            of_rank = replace(self._arguments, rank=epoch.replica)
            tests = np.load(self._tests)
            x, y = (torch.from_numpy(tests[name]) for name in "xy")

            def copied() -> Callable[[], float]:
                copy = agreed.copied()
                return lambda: of_rank.task.test(copy, x, y)

            self._gauge = Gauge(of_rank, Meeting(of_rank, host=False), None, copied)
            self._gauge.begin()

    def on_step_end(self, step: daskdl.Step) -> None:
        assert self._gauge is not None
        self._gauge.goes_on(step.examples)


def serve(arguments: Arguments) -> None:
    """Be a worker on this host, as `dask worker` is one."""
    with tempfile.TemporaryDirectory() as folder, dask.config.set(HOUSEKEEPING):
        command = [
            f"tcp://{arguments.address}:{arguments.port + 1}",
            "--nthreads=1",
            "--no-nanny",
        ]
        command += [f"--host={arguments.host}", f"--local-directory={folder}"]
        command += ["--no-dashboard", f"--death-timeout={START_S}"]
        dask_worker.main(command)


def write_files(arguments: Arguments, folder: Path) -> str:
    """Write the rows for training, in parts, and for tests; returns a pattern."""
    x, y, x_test, y_test = arguments.task.split()
    np.savez(folder / TESTS, x=x_test, y=y_test)
    for part in range(PARTS):
        np.save(folder / f"{part}.x.npy", x[part::PARTS])
        np.save(folder / f"{part}.y.npy", y[part::PARTS])
    return f"{folder}/*.x.npy"


def load_mapped(file: Any) -> tuple[np.ndarray, np.ndarray]:
    """Load a part, which stays in the page cache, as the others have their data."""
    x = np.load(file.name, mmap_mode="r")
    return x, np.load(file.name.replace(".x.", ".y."))


def parts(steps: daskdl.StepTable) -> dict[str, float]:
    """Milliseconds of a step and of its parts, means of the later half."""
    half = max(row["step"] for row in steps) / 2
    later = [row for row in steps if row["step"] > half]
    seconds = {
        f"{name}_ms": 1e3 * float(np.mean([row[f"{name}_s"] for row in later]))
        for name in ("step", "encode", "apply", "wait")
    }
    return seconds | {"density": float(np.nanmean([row["density"] for row in later]))}


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--way", choices=WAYS, default="sharing")
    cli.add_argument("--every", type=int, default=0, help="steps between exchanges")
    cli.add_argument("--momentum", type=float, default=0.0, help="of sharing")
    cli.add_argument("--serve", action="store_true", help="rank 0 is a worker, too")
    arguments, more = read(cli)
    if arguments.rank > 0 or more.serve:
        serve(arguments)
        return
    meeting = Meeting(arguments)
    with (
        dask.config.set(HOUSEKEEPING),
        LocalCluster(
            n_workers=0,
            host=arguments.host,
            scheduler_port=arguments.port + 1,
            protocol="tcp",
            dashboard_address=":0",
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        pattern = write_files(arguments, Path(folder))
        client.wait_for_workers(arguments.world, timeout=START_S)
        trainer = daskdl.Trainer(
            arguments.task.model,
            arguments.task.loss,
            arguments.new_optimizer(),
            master=WAYS[more.way](more.every, more.momentum),
            client=client,
            callbacks=[Counts(arguments, folder), Ends(arguments, meeting)],
            seed=arguments.seed,
            progress=False,
        )
        with contextlib.suppress(EnoughError):
            trainer.fit(
                daskdl.data.files(pattern, load_mapped),
                epochs=10**6,
                batch_size=arguments.task.batch_size,
            )
        print_summary(arguments, meeting, parts=parts(trainer.history_.steps))


if __name__ == "__main__":
    main()
