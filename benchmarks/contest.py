"""Contestants side by side, on hosts whose links have a rate.

Hides how the processes of a contestant are started, and how contestants take turns: the
speed of a machine changes by the minute, so only ratios within a round are compared.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.namespaces import UNLIMITED, Place, end_tree, hosts, unavailable
from benchmarks.report import bars
from benchmarks.results import ROOT, Question, Result, medians
from benchmarks.work import WORKS
from daskdl.process_settings import SETTINGS


@dataclass(frozen=True)
class Contestant:
    """A way of training."""

    name: str  # in tables
    script: str  # a module of `benchmarks.peers`
    options: str = ""  # of the script
    alone: bool = False  # one process, whatever the number of hosts
    kept: bool = True  # freed memory is kept for the next step, as daskdl keeps it
    serves: bool = False  # a worker on each host, and rank 0 is their client beside one


PLAIN = ("ddp", "--way=plain")
CONTESTANTS = {
    "single": Contestant("plain, one process", *PLAIN, alone=True),
    "independent": Contestant("plain, independent processes", *PLAIN),
    "independent-freed": Contestant("plain, freed memory returned", *PLAIN, kept=False),
    "ddp": Contestant("DDP, gloo", "ddp"),
    "ddp-fp16": Contestant("DDP, fp16 hook", "ddp", "--hook=fp16"),
    "ddp-powersgd": Contestant("DDP, PowerSGD rank 1", "ddp", "--hook=powersgd"),
    "post-local-sgd": Contestant("post-local SGD, every 16", "ddp", "--way=post-local"),
    "torchft-local-sgd": Contestant("torchft LocalSGD, every 16", "fault_tolerant"),
    "torchft-diloco": Contestant(
        "torchft DiLoCo, every 16", "fault_tolerant", "--rule=diloco"
    ),
    "hivemind-16": Contestant("hivemind, every 16", "hive"),
    "hivemind-256": Contestant("hivemind, every 256", "hive", "--every=256"),
    "ray-train": Contestant("Ray Train", "ray_train"),
    "daskdl": Contestant("daskdl", "own", serves=True),
    "daskdl-1": Contestant("daskdl, exchange_every=1", "own", "--every=1", serves=True),
    "daskdl-16": Contestant(
        "daskdl, exchange_every=16", "own", "--every=16", serves=True
    ),
    "daskdl-momentum": Contestant(
        "daskdl, momentum=0.9", "own", "--momentum=0.9", serves=True
    ),
    "daskdl-averaging": Contestant(
        "daskdl, averaging every 16",
        "own",
        "--way=averaging --every=16",
        serves=True,
    ),
}
BASE = "independent"
STREAM = Contestant("one TCP stream", "stream")

LEAVE_S = 10  # for all processes to end, after rank 0 has printed its line
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")  # last line of a traceback
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Course:
    """What all contestants of a run have to do."""

    work: str = "mlp"
    seconds: float = 10.0  # that count; with a target, at most
    warm_up: float = 3.0  # seconds before
    optimizer: str = "SGD"
    rate_factor: float = 1.0  # on the learning rate
    target: float | None = None  # score at which training ends; None: never scored
    python: str = sys.executable  # the interpreter that has the contestants' libraries
    patience: float = 240.0  # seconds for a start, and a block on a slow link
    own_core: bool = False  # for rank 0's training thread; all else shares the others


def compete(
    contestant: Contestant, place: Place, course: Course, seed: int = 0
) -> dict[str, Any]:
    """Let a contestant train; its line of results, or ``{"error": ...}``."""
    world = 1 if contestant.alone else len(place.addresses)
    options: dict[str, Any] = {
        "world": world,
        "address": place.addresses[0],
        "port": place.first_port(),
        "interface": place.interface,
        "work": course.work,
        "optimizer": course.optimizer,
        "warm-up": course.warm_up,
        "seconds": course.seconds,
        "rate-factor": course.rate_factor,
        "seed": seed,
        "began": time.time(),
    }
    if course.target is not None:
        options["target"] = course.target
    cores = sorted(os.sched_getaffinity(0))
    if course.own_core:
        options["own-core"] = cores.pop(0)
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GLOO_SOCKET_IFNAME": place.interface,
    }
    # A checkout's own modules get bytecode files, as those of installed packages have.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if contestant.kept:  # read by glibc
        environment |= {
            setting.variable: str(setting.kept_bytes) for setting in SETTINGS
        }
    roles = [(rank, contestant.options) for rank in range(world)]
    if contestant.serves:
        roles.append((0, f"{contestant.options} --serve"))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{number}.log") for number in range(len(roles))]
        with contextlib.ExitStack() as ends:
            processes = []
            for (rank, more), log in zip(roles, logs, strict=True):
                command = [course.python, "-m", f"benchmarks.peers.{contestant.script}"]
                command += [f"--rank={rank}", f"--host={place.addresses[rank]}"]
                command += [f"--{name}={value}" for name, value in options.items()]
                process = subprocess.Popen(
                    place.on(rank, *command, *more.split()),
                    stdout=subprocess.PIPE,
                    stderr=ends.enter_context(log.open("wb")),
                    env=environment,
                    cwd=ROOT,
                    preexec_fn=functools.partial(os.sched_setaffinity, 0, cores),
                )
                ends.callback(end_tree, process)
                processes.append(process)
            limit_s = course.patience + course.warm_up + 2 * course.seconds
            line = _first_line(processes[0], limit_s)
            ends.callback(place.end)
            if line is not None:
                _wait(processes)
                return line
        return {"error": _reason(logs)}


def _first_line(
    process: subprocess.Popen[bytes], limit_s: float
) -> dict[str, Any] | None:
    """The line of JSON that rank 0 prints."""
    assert process.stdout is not None
    until = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            line = process.stdout.readline()
            if line.startswith(b"{"):
                report: dict[str, Any] = json.loads(line)
                return report
            if not line:
                break
    return None


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + LEAVE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, until - time.monotonic()))


def _reason(logs: Sequence[Path]) -> str:
    """The first error in the logs, rank 0 first, or the last line."""
    texts = [log.read_text(errors="replace").strip().splitlines() for log in logs]
    errors = [line for lines in texts for line in lines if ERROR.match(line)]
    errors += [lines[-1] for lines in texts if lines]
    return errors[0].strip()[:300] if errors else "no result in time, and no output"


# ---- questions about contestants


def options(
    rates: Sequence[str], contestants: Sequence[str], seconds: float = 10.0
) -> dict[str, Any]:
    return {
        "--rates": {
            "nargs": "+",
            "default": list(rates),
            "help": "of each link, as tc has it (1gbit, 10mbit), or unlimited",
        },
        "--contestants": {
            "nargs": "+",
            "choices": CONTESTANTS,
            "default": list(contestants),
            "metavar": "NAME",
            "help": f"of {', '.join(CONTESTANTS)}",
        },
        "--hosts": {"type": int, "default": 2, "choices": (2, 3, 4)},
        "--work": {"choices": WORKS, "default": "mlp"},
        "--optimizer": "SGD",
        "--seconds": {"type": float, "default": seconds, "help": "that are counted"},
        "--warm-up": {"type": float, "default": 3.0, "help": "seconds before"},
        "--patience": {"type": float, "default": 240.0, "help": "seconds for a start"},
        "--python": {"default": sys.executable, "help": "has the libraries"},
        "--loopback": {"action": "store_true", "help": "all on this host; unlimited"},
        "--own-core": {
            "action": "store_true",
            "help": "for rank 0, which counts alone",
        },
        "--seeds": [0, 1, 2],
    }


def available(asked: argparse.Namespace, question: str) -> bool:
    """Whether there can be such hosts; if not, the reason is printed."""
    reason = None if asked.loopback else unavailable()
    if reason is not None:
        print(f"# {question} skipped, no network namespaces: {reason}; try --loopback")
    return reason is None


def course_of(asked: argparse.Namespace, **changes: Any) -> Course:
    names = ("work", "optimizer", "seconds", "warm_up", "patience", "python")
    names = (*names, "own_core")
    options = {name: getattr(asked, name) for name in names if name not in changes}
    return Course(**options | changes)


def errors_of(rounds: Sequence[dict[str, Any]]) -> str | None:
    errors = dict.fromkeys(run["error"] for run in rounds if "error" in run)
    return "; ".join(errors) or None


def median(rounds: Sequence[dict[str, Any]], name: str) -> float:
    """Over the rounds that have it; NaN if none has."""
    return medians([{name: run.get(name)} for run in rounds])[name]


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One per rate and contestant."""
    if not available(asked, "links"):
        return
    names, course = list(dict.fromkeys([BASE, *asked.contestants])), course_of(asked)
    with hosts(asked.hosts, loopback=asked.loopback) as place:
        for rate in asked.rates:
            place.limit(rate)
            measured = compete(
                STREAM, place, course_of(asked, seconds=2.0, warm_up=0.0)
            )
            carried = measured.get(
                "error", f"{measured.get('mbit_per_s', 0):,.0f} Mbit/s"
            )
            asked.notes.append(
                f"{rate}: one TCP stream from host to host carries {carried}"
            )
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for seed in asked.seeds:
                for name in names:
                    measured = compete(CONTESTANTS[name], place, course, seed)
                    rounds[name].append(measured)
                    speed = measured.get(
                        "error", f"{measured.get('samples_per_s', 0):,.0f}"
                    )
                    print(f"# {rate} {name}: {speed}", file=sys.stderr, flush=True)
            for name in names:
                yield row(CONTESTANTS[name], rate, rounds[name], rounds[BASE])


def row(
    contestant: Contestant,
    rate: str,
    rounds: Sequence[dict[str, Any]],
    base: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Medians of a contestant at one rate, without rounds that failed."""
    ratios, early = (
        ratios_of(rounds, base, name)
        for name in ("samples_per_s", "warm_up_samples_per_s")
    )
    return {
        "contestant": contestant.name,
        "rate": rate,
        "samples_per_s": median(rounds, "samples_per_s"),
        "early": statistics.median(early or [math.nan]),
        "from_step": median(rounds, "from_step"),
        "ratio": statistics.median(ratios or [math.nan]),
        "ratio_lowest": min(ratios, default=math.nan),
        "ratio_highest": max(ratios, default=math.nan),
        "sent_kb_per_step": median(rounds, "sent_kb_per_step"),
        "startup_s": median(rounds, "startup_s"),
        "error": errors_of(rounds),
        "rounds": list(rounds),
    }


def ratios_of(
    rounds: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], name: str
) -> list[float]:
    """Each round's value relative to the baseline's, where both have one."""
    pairs = [
        (run.get(name), base_run.get(name))
        for run, base_run in zip(rounds, base, strict=True)
    ]
    return [value / base_value for value, base_value in pairs if value and base_value]


ALL_RATES = (UNLIMITED, "1gbit", "100mbit", "10mbit")
SOME = (
    *("independent", "independent-freed", "ddp", "ddp-powersgd", "post-local-sgd"),
    *("daskdl", "daskdl-16"),
)
LINKS_TEXT = """Ways of training on links of several rates.

Question: How fast do two to four hosts train together, at each rate of their links?
Counted:  Samples/s of all hosts together, by the wall clock, without warm-up and
          start-up; one process of one torch thread per host. Hosts are network
          namespaces on one bridge; `tc tbf` limits each link, in each direction. Bytes
          are those sent by the host's interface. Contestants take turns; `ratio` is the
          median over seeds of a contestant's speed relative to the baseline's in the
          same round. `early` is the same for the warm-up of that round, without
          start-up; `from_step` is the number of steps of rank 0 before those that
          count. So a long warm-up shows the first steps beside the later ones: daskdl
          exchanges more often in its first 1,024 steps, which `--warm-up 30` covers on
          a core that makes 35 steps/s.
          All keep freed memory for the next step, as daskdl's workers do (two variables
          of glibc), but for "freed memory returned": what that setting alone gives.
          With `--own-core`, only rank 0 counts, whose training thread has a core to
          itself; all other threads and processes share the other cores.
Baseline: as many independent plain processes: the limit of these cores.
Run:      python -m benchmarks links --rates unlimited 1gbit 100mbit 10mbit
"""
PEERS_TEXT = """daskdl beside other ways of training with several processes.

Question: At equal work on a CPU, how fast are the libraries for distributed training
          that PyPI offers for Python 3.11?
Counted:  As in `links`, on links without a limit by default. Each contestant is a
          script of `benchmarks/peers`, with the settings that its documentation
          recommends. The table shows the error of a contestant that cannot run.
Baseline: as many independent plain processes, and one alone.
Run:      python -m benchmarks peers
          First, for all contestants: python -m pip install -c constraints.txt
          -r benchmarks/peers/requirements.txt
"""
COLUMNS = (
    "contestant rate samples_per_s:,.0f early:.3f from_step:,.0f "
    "ratio:.3f ratio_lowest:.3f ratio_highest:.3f "
    "sent_kb_per_step:,.1f startup_s:.1f error"
)


def _bars(result: Result) -> Any:
    return bars(result, "ratio", "contestant", group="rate")


LINKS = Question("links", LINKS_TEXT, rows, COLUMNS, options(ALL_RATES, SOME), _bars)
PEERS = Question(
    *("peers", PEERS_TEXT, rows, COLUMNS),
    *(options([UNLIMITED], list(CONTESTANTS)), _bars),
)
