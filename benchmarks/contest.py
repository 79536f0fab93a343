"""One contestant at work on its hosts: start its processes, read the line it prints."""

import contextlib
import json
import math
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.places import Place, end_tree
from daskdl.util import SETTINGS

ROOT = Path(__file__).parents[1]
KEEP = {one.variable: str(one.kept_bytes) for one in SETTINGS}  # read by glibc
LEAVE_S = 10  # for all processes, after rank 0 has printed its line
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")  # as tracebacks end

Process = subprocess.Popen[bytes]

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Course:
    """What all contestants of a run have to do.

    Attributes:
        work: Name of the work.
        seconds: Of training that count; with a target, at most.
        warm_up: Seconds before.
        optimizer: Name of the rule.
        rate_factor: Times one process's learning rate, of those that share a model.
        target: Score at which training ends; None: none is computed.
        python: The interpreter that has the contestants' libraries.
        patience: Seconds for all else: a start, and one block on a slow link.
    """

    work: str = "mlp"
    seconds: float = 10.0
    warm_up: float = 3.0
    optimizer: str = "SGD"
    rate_factor: float = 1.0
    target: float | None = None
    python: str = sys.executable
    patience: float = 240.0

    @property
    def limit_s(self) -> float:
        """What is not there by then will not come."""
        return self.patience + self.warm_up + 2 * self.seconds


def compete(
    contestant: Contestant, place: Place, course: Course, seed: int = 0
) -> dict[str, Any]:
    """Let one contestant train.

    Returns:
        What it printed; or ``error``, the last line that it wrote about it.
    """
    world = 1 if contestant.alone else len(place.addresses)
    port = place.first_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(world)]
        with contextlib.ExitStack() as ends:
            began, processes = time.time(), []
            for rank, log in enumerate(logs):
                common = _options(place, course, rank, world, port)
                command = [course.python, "-m", f"benchmarks.peers.{contestant.script}"]
                command += [*common, *contestant.options, f"--seed={seed}"]
                command += [
                    f"--began={began}",
                    f"--rate-factor={_factor(contestant, course)}",
                ]
                process = subprocess.Popen(
                    place.on(rank, *command),
                    stdout=subprocess.PIPE,
                    stderr=ends.enter_context(log.open("wb")),
                    env=_environment(place, contestant),
                    cwd=ROOT,
                )
                ends.callback(end_tree, process)
                processes.append(process)
            line = _line_of(processes[0], course.limit_s)
            ends.callback(place.end)
            if line is not None:
                _wait(processes)
                return line
        return {"error": _reason(logs)}


def _factor(contestant: Contestant, course: Course) -> float:
    return course.rate_factor if contestant.shares else 1.0


def _options(
    place: Place, course: Course, rank: int, world: int, port: int
) -> list[str]:
    found: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "address": place.addresses[0],
        "port": port,
        "own": place.addresses[rank],
        "interface": place.interface,
        "work": course.work,
        "optimizer": course.optimizer,
        "warm-up": course.warm_up,
        "seconds": course.seconds,
    }
    if course.target is not None:
        found["target"] = course.target
    return [f"--{name}={value}" for name, value in found.items()]


def _environment(place: Place, contestant: Contestant) -> dict[str, str]:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ONE_THREAD,
        **(KEEP if contestant.kept else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GLOO_SOCKET_IFNAME": place.interface,
    }


def _line_of(process: Process, limit_s: float) -> dict[str, Any] | None:
    """The line of JSON that rank 0 prints, as soon as it is there.

    Returns:
        None if the process ends without, or is not ready in time.
    """
    assert process.stdout is not None
    until = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            line = process.stdout.readline()
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
            if not line:
                break
    return None


def _wait(processes: list[Process]) -> None:
    """Until all have ended by themselves, as they do soon after."""
    until = time.monotonic() + LEAVE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, until - time.monotonic()))


def _reason(logs: list[Path]) -> str:
    """The first error that somebody wrote, rank 0 first, or the last line."""
    texts = [log.read_text(errors="replace").strip().splitlines() for log in logs]
    errors = [line for lines in texts for line in lines if ERROR.match(line)]
    said = errors + [lines[-1] for lines in texts if lines]
    return said[0].strip()[:300] if said else "no result in time, and nothing said"


def ratio(own: float | None, base: float | None) -> float:
    """Of two rates of one run; NaN if one of them is missing.

    Example:
        >>> ratio(3.0, 2.0), ratio(None, 2.0)
        (1.5, nan)
    """
    return own / base if own and base else math.nan
