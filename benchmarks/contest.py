"""One contestant at work on its hosts: start its processes, read the line it prints."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.places import Place, end_group

ROOT = Path(__file__).parents[1]
LEAVE_S = 20  # after rank 0 has ended
SLACK_S = 240  # a start, and one block of steps on a slow link

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
    """

    work: str = "mlp"
    seconds: float = 10.0
    warm_up: float = 3.0
    optimizer: str = "SGD"
    rate_factor: float = 1.0
    target: float | None = None
    python: str = sys.executable


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
                command += [f"--began={began}", f"--rate-factor={_factor(contestant, course)}"]
                process = subprocess.Popen(
                    place.on(rank, *command),
                    stdout=subprocess.PIPE,
                    stderr=ends.enter_context(log.open("wb")),
                    env=_environment(place),
                    cwd=ROOT,
                    start_new_session=True,
                )
                ends.callback(end_group, process)
                processes.append(process)
            line = _line_of(processes[0], SLACK_S + course.warm_up + 2 * course.seconds)
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


def _environment(place: Place) -> dict[str, str]:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ONE_THREAD,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GLOO_SOCKET_IFNAME": place.interface,
    }


def _line_of(
    process: "subprocess.Popen[bytes]", limit_s: float
) -> dict[str, Any] | None:
    """What rank 0 printed last, if that was a line of JSON."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    lines = [line for line in output.decode().splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _wait(processes: "list[subprocess.Popen[bytes]]") -> None:
    """For the others, which end by themselves when rank 0 has."""
    until = time.monotonic() + LEAVE_S
    for process in processes[1:]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=max(0.1, until - time.monotonic()))


def _reason(logs: list[Path]) -> str:
    """The last line that says something, rank 0's first."""
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        said = [line.strip() for line in lines if "Error" in line]
        if said:
            return said[-1][:300]
    return "no result in time, and no error"


def ratio(own: float | None, base: float | None) -> float:
    """Of two rates of one run; NaN if one of them is missing.

    Example:
        >>> ratio(3.0, 2.0), ratio(None, 2.0)
        (1.5, nan)
    """
    return own / base if own and base else math.nan
