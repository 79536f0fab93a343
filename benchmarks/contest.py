"""Ways of training side by side, on hosts whose links have a rate.

Hides how the processes of a contestant are started, and how contestants take turns:
machines change their speed from minute to minute, so only the ratio of two rates of one
round is compared, and of these the median is taken.
"""

import argparse
import contextlib
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
from benchmarks.results import Question, Result
from benchmarks.work import WORKS
from daskdl.util import SETTINGS


@dataclass(frozen=True)
class Contestant:
    """A way of training."""

    name: str  # in tables
    script: str  # module of `benchmarks.peers`
    options: tuple[str, ...] = ()  # of the script
    alone: bool = False  # whether it is one process, whatever the number of hosts
    shares: bool = True  # whether its processes train one model
    # whether freed memory is kept for the next step, as daskdl keeps it
    kept: bool = False


SINGLE = "plain, one process"
INDEPENDENT = "plain, independent processes"
KEPT = "plain, freed memory kept"

CONTESTANTS = {
    key: Contestant(*rest)
    for key, *rest in (
        ("single", SINGLE, "ddp", ("--way=plain",), True, False),
        ("independent", INDEPENDENT, "ddp", ("--way=plain",), False, False),
        ("independent-kept", KEPT, "ddp", ("--way=plain",), False, False, True),
        ("ddp", "DDP, gloo", "ddp"),
        ("ddp-fp16", "DDP, fp16 hook", "ddp", ("--hook=fp16",)),
        ("ddp-powersgd", "DDP, PowerSGD rank 1", "ddp", ("--hook=powersgd",)),
        ("post-local-sgd", "post-local SGD, every 16", "ddp", ("--way=post-local",)),
        ("torchft-local-sgd", "torchft LocalSGD, every 16", "fault_tolerant"),
        (
            "torchft-diloco",
            "torchft DiLoCo, every 16",
            "fault_tolerant",
            ("--rule=diloco",),
        ),
        ("hivemind-16", "hivemind, every 16", "hive"),
        ("hivemind-256", "hivemind, every 256", "hive", ("--every=256",)),
        ("ray-train", "Ray Train", "ray_train"),
        ("daskdl", "daskdl, exchange_every=1", "own"),
        ("daskdl-16", "daskdl, exchange_every=16", "own", ("--every=16",)),
        (
            "daskdl-averaging",
            "daskdl, averaging every 16",
            "own",
            ("--way=averaging", "--every=16"),
        ),
    )
}


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
    """What all contestants of a run have to do."""

    work: str = "mlp"  # name of the work
    seconds: float = 10.0  # of training that count; with a target, at most
    warm_up: float = 3.0  # seconds before
    optimizer: str = "SGD"  # name of the rule
    # times one process's learning rate, of those that share a model
    rate_factor: float = 1.0
    target: float | None = None  # score at which training ends; None: none is computed
    python: str = sys.executable  # the interpreter that has the contestants' libraries
    # seconds for all else: a start, and one block on a slow link
    patience: float = 240.0

    @property
    def limit_s(self) -> float:
        """What is not there by then will not come."""
        return self.patience + self.warm_up + 2 * self.seconds


def compete(
    contestant: Contestant, place: Place, course: Course, seed: int = 0
) -> dict[str, Any]:
    """Let one contestant train."""
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
    """The line of JSON that rank 0 prints, as soon as it is there."""
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


BASE = "independent"
STREAM = Contestant("one TCP stream", "stream")

COLUMNS = {
    "contestant": "",
    "rate": "",
    "samples_per_s": ",.0f",
    "ratio": ".3f",
    "ratio_lowest": ".3f",
    "ratio_highest": ".3f",
    "sent_kb_per_step": ",.1f",
    "startup_s": ".1f",
    "error": "",
}


def options(
    parser: argparse.ArgumentParser, rates: Sequence[str], contestants: Sequence[str]
) -> None:
    """Of a question about contestants on links."""
    parser.add_argument(
        "--rates",
        nargs="+",
        default=list(rates),
        help="of each link, as tc has it (1gbit, 10mbit), or unlimited",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=CONTESTANTS,
        default=list(contestants),
        metavar="NAME",
        help=f"of {', '.join(CONTESTANTS)}",
    )
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--work", choices=WORKS, default="mlp")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are counted")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before")
    parser.add_argument("--patience", type=float, default=240.0, help="for a start")
    parser.add_argument(
        "--python", default=sys.executable, help="that has the contestants' libraries"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="all on this host; only unlimited"
    )


def available(asked: argparse.Namespace, question: str) -> bool:
    """Whether there can be such hosts; if not, the reason is printed."""
    reason = None if asked.loopback else unavailable()
    if reason is not None:
        print(f"# {question} skipped, no network namespaces: {reason}; --loopback does")
    return reason is None


def course(asked: argparse.Namespace, **changes: Any) -> Course:
    """What the options ask of each contestant."""
    found = {
        name: getattr(asked, name)
        for name in ("work", "optimizer", "seconds", "warm_up", "patience", "python")
    }
    return Course(**found | changes)


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One for each rate and contestant, with the median over rounds."""
    names = list(dict.fromkeys([BASE, *asked.contestants]))
    with hosts(asked.hosts, loopback=asked.loopback) as place:
        for rate in asked.rates:
            place.limit(rate)
            _note_what_it_carries(asked, place, rate)
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for seed in asked.seeds:
                for name in names:
                    found = compete(CONTESTANTS[name], place, course(asked), seed)
                    rounds[name].append(found)
                    said = found.get("error", f"{found.get('samples_per_s', 0):,.0f}")
                    print(f"# {rate} {name}: {said}", file=sys.stderr, flush=True)
            for name in names:
                yield row(CONTESTANTS[name], rate, rounds[name], rounds[BASE])


def _note_what_it_carries(asked: argparse.Namespace, place: Place, rate: str) -> None:
    found = compete(STREAM, place, course(asked, seconds=2.0, warm_up=0.0))
    said = found.get("error", f"{found.get('mbit_per_s', 0):,.0f} Mbit/s")
    asked.notes.append(f"{rate}: one TCP stream from host to host carries {said}")


def row(
    contestant: Contestant,
    rate: str,
    rounds: Sequence[dict[str, Any]],
    base: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Of one contestant at one rate; a round that failed counts for nothing."""
    pairs = zip(rounds, base, strict=True)
    key = "samples_per_s"
    ratios = [ratio(own.get(key), other.get(key)) for own, other in pairs]
    ratios = [own for own in ratios if not math.isnan(own)]
    errors = [own["error"] for own in rounds if "error" in own]
    return {
        "contestant": contestant.name,
        "rate": rate,
        "samples_per_s": median(rounds, key),
        "ratio": statistics.median(ratios) if ratios else math.nan,
        "ratio_lowest": min(ratios, default=math.nan),
        "ratio_highest": max(ratios, default=math.nan),
        "sent_kb_per_step": median(rounds, "sent_kb_per_step"),
        "startup_s": median(rounds, "startup_s"),
        "error": "; ".join(dict.fromkeys(errors)) or None,
        "rounds": list(rounds),
    }


def median(rounds: Sequence[dict[str, Any]], name: str) -> float:
    """Over the rounds that have it; NaN if none has."""
    found = [own[name] for own in rounds if own.get(name) is not None]
    return float(statistics.median(found)) if found else math.nan


ALL_RATES = (UNLIMITED, "1gbit", "100mbit", "10mbit")
SOME = ("independent", "ddp", "ddp-powersgd", "post-local-sgd", "daskdl", "daskdl-16")
LINKS_TEXT = """What the rate of the links costs each way of training.

Question: how fast do two to four hosts train together, at each rate of their links?
Counted:  samples/s of all hosts together, by the wall clock, warm-up excluded and
          start-up apart; one process of one torch thread on each host. Hosts are
          network namespaces on one bridge; `tc tbf` limits each link, each way. Bytes
          are those that the host's interface has sent. The contestants take turns;
          `ratio` is the median over seeds of a contestant to the baseline in the same
          round.
Baseline: as many plain processes that know nothing of each other: what these cores can
          do.
Run:      python -m benchmarks links --rates unlimited 1gbit 100mbit 10mbit
"""
PEERS_TEXT = """daskdl beside other ways of training with several processes.

Question: how fast is each way that PyPI has for Python 3.11 on a CPU, at equal work?
Counted:  as in `links`, whose hosts these are; by default their links carry
          what they can. Each contestant is a script of `benchmarks/peers`, with the
          settings that its documentation recommends. One that cannot run is named with
          its error.
Baseline: as many plain processes that know nothing of each other, and one alone.
Run:      python -m pip install -c constraints.txt -r benchmarks/peers/requirements.txt
          python -m benchmarks peers
"""


def _answered(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if available(asked, "links"):
        yield from rows(asked)


def _links(parser: argparse.ArgumentParser) -> None:
    options(parser, ALL_RATES, SOME)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def _peers(parser: argparse.ArgumentParser) -> None:
    options(parser, [UNLIMITED], list(CONTESTANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def _bars(result: Result) -> Any:
    return bars(result, "ratio", "contestant", "rate")


LINKS = Question("links", LINKS_TEXT, _links, _answered, COLUMNS, _bars)
PEERS = Question("peers", PEERS_TEXT, _peers, _answered, COLUMNS, _bars)
