"""Common to all contestants: arguments, a meeting of processes, training, counting."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore

from benchmarks.work import WORKS, Task, batches, plain_step


@dataclass(frozen=True)
class Arguments:
    """One process of a contestant."""

    rank: int = 0
    world: int = 1  # number of processes, one per host
    address: str = "127.0.0.1"  # of the host of rank 0
    port: int = 29400  # the first of ten on that host for the contestant
    host: str = "127.0.0.1"  # address of this process's host
    interface: str = "lo"  # network interface of this host
    work: str = "mlp"
    seed: int = 0  # of the initial model and of the order of the data
    optimizer: str = "SGD"
    rate_factor: float = 1.0  # on the learning rate that suits one process
    warm_up: float = 2.0  # seconds of training before those that count
    seconds: float = 5.0  # seconds of training that count; with a target, at most
    target: float | None = None  # score at which training ends; None: never scored
    began: float = field(default_factory=time.time)  # start of the contestant
    own_core: int = -1  # CPU that only rank 0's training thread uses; -1: none

    @property
    def task(self) -> Task:
        return WORKS[self.work]

    def new_optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        return self.task.optimizer(self.optimizer, self.rate_factor)

    def model(self) -> nn.Module:
        """The same on all ranks."""
        torch.manual_seed(self.seed)
        return self.task.model()


def parser(text: str) -> argparse.ArgumentParser:
    """For a contestant's script, which may add options."""
    cli = argparse.ArgumentParser(description=text.splitlines()[0])
    for name, value in vars(Arguments()).items():
        kind = float if value is None else type(value)
        cli.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    return cli


def read(cli: argparse.ArgumentParser) -> tuple[Arguments, argparse.Namespace]:
    """The common arguments, and those of this script."""
    values = vars(cli.parse_args())
    common = {name: values.pop(name) for name in Arguments.__dataclass_fields__}
    torch.set_num_threads(1)
    return Arguments(**common), argparse.Namespace(**values)


PATIENCE = timedelta(minutes=30)  # a step of the slowest may take minutes


class Meeting:
    """A store of values that all processes of a contestant read and write."""

    def __init__(self, arguments: Arguments, *, host: bool | None = None) -> None:
        self._world = arguments.world
        self._store = TCPStore(
            arguments.address,
            arguments.port,
            is_master=arguments.rank == 0 if host is None else host,
            timeout=PATIENCE,
            wait_for_workers=False,
        )

    def wait_for_all(self, name: str) -> None:
        """Wait until all processes have called this."""
        if self._store.add(f"{name} count", 1) == self._world:
            self._store.set(f"{name} all", b"")
        self._store.wait([f"{name} all"])

    def put(self, name: str, value: Any) -> None:
        self._store.set(name, json.dumps(value))

    def get(self, name: str) -> Any:
        """Wait for a value."""
        return json.loads(self._store.get(name))

    def has(self, name: str) -> bool:
        return self._store.check([name])


DECIDE_S = 0.25  # of training between two decisions, at most a block's time more
SCORE_S, SCORE_SHARE = 0.5, 0.05  # between two scores: seconds, and share of the time
IN_MEAN = 3  # successive scores in the mean that has to reach the target


def reached(
    curve: Sequence[tuple[float, float]], task: Task, target: float
) -> float | None:
    """Seconds until the mean of three successive scores reached the target.

    One score alone goes up and down from step to step.

    Example:
        >>> from benchmarks.work import WORKS
        >>> curve = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.7), (4.0, 0.8), (5.0, 0.9)]
        >>> reached(curve, WORKS["mlp"], 0.75), reached(curve[:3], WORKS["mlp"], 0.75)
        (4.0, None)
    """
    for end in range(IN_MEAN, len(curve) + 1):
        scores = [score for _, score in curve[end - IN_MEAN : end]]
        if task.better(statistics.fmean(scores), target):
            return curve[end - 1][0]
    return None


class Least(NamedTuple):
    """Steps that each process makes, however long they take."""

    warm_up: int = 1
    counted: int = 1


@dataclass
class Report:
    """Results of one process: of the time that counts, and of the warm-up."""

    startup_s: float = 0.0  # from the start of the contestant until all were ready
    warm_up_s: float = 0.0  # of training before the time that counts
    warm_up_rows: int = 0
    warm_up_steps: int = 0
    seconds: float = 0.0  # of training that is counted
    rows: int = 0
    steps: int = 0
    sent: int = 0  # bytes, by the host's interface
    received: int = 0
    # seconds of training and score
    curve: list[tuple[float, float]] = field(default_factory=list)
    reached_s: float | None = None  # seconds of training until the target


def carried(interface: str) -> tuple[int, int]:
    """Bytes sent and received by an interface of this host."""
    folder = Path("/sys/class/net", interface, "statistics")
    sent, received = (
        int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")
    )
    return sent, received


class Gauge:
    """Counts the steps of one process, and decides when it has trained enough.

    Processes that step together stop, and their clock too, while rank 0 scores its
    model. Where each goes on by itself, rank 0 keeps copies of its model and scores
    them after training, which then takes all of its time.

    Args:
        block: Steps between two meetings of all processes; None: they never meet.
        copied: Copies the model; returns a function that scores the copy.
    """

    def __init__(
        self,
        arguments: Arguments,
        meeting: Meeting,
        block: int | None,
        copied: Callable[[], Callable[[], float]],
        least: Least = Least(),  # noqa: B008 - a value
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own, self._meeting, self._block, self._copied = (
            arguments,
            meeting,
            block,
            copied,
        )
        self._copies: list[tuple[float, Callable[[], float]]] = []
        self._least = least
        self._clock, self._paused = clock, 0.0
        self._phase = "warm-up" if arguments.target is None else "timed"
        self._made, self._next, self._blocks = 0, 0, 0
        self._scored_at = 0.0
        self.report = Report()

    def begin(self) -> None:
        """Wait in the training thread until all processes are ready to train."""
        if self._own.rank == 0 and self._own.own_core >= 0:
            os.sched_setaffinity(0, {self._own.own_core})  # this thread only
        self._meeting.wait_for_all("begin")
        self.report.startup_s = time.time() - self._own.began
        self._start()

    def goes_on(self, rows: int) -> bool:
        """Whether to make another step, of so many rows."""
        if self._made == self._next and self._phase != "over":
            self._decide()
        if self._phase == "over":
            return False
        self._made += 1
        self.report.rows += rows
        self.report.steps += 1
        return True

    def _start(self) -> None:
        self.report.rows = self.report.steps = 0
        self._began, self._paused = self._clock(), 0.0
        self._carried = carried(self._own.interface)

    def _seconds(self) -> float:
        return self._clock() - self._began - self._paused

    def _decide(self) -> None:
        leads = self._block is None or self._own.rank == 0
        if leads:
            decided = self._judge(), self._until_next()
        if self._block is not None:
            name = f"decision {self._blocks}"
            if leads:
                self._meeting.put(name, decided)
            else:
                decided = self._meeting.get(name)
        phase, blocks = decided
        self._blocks += blocks
        self._next = self._made + blocks * (self._block or 1)
        self._enter(phase)

    def _judge(self) -> str:
        """The phase that begins now."""
        if self._phase == "warm-up":
            steps = self._made >= self._least.warm_up
            enough = steps and self._seconds() >= self._own.warm_up
            return "timed" if enough else "warm-up"
        if self._own.target is not None and self._scores():
            return "over"
        least = 1 if self._own.target is not None else self._least.counted
        enough = self._seconds() >= self._own.seconds and self.report.steps >= least
        return "over" if enough else "timed"

    def _scores(self) -> bool:
        """Score or copy the model if it is time to; whether the target is reached."""
        if self._own.rank > 0:
            return False
        now, last = self._seconds(), self._scored_at
        if now < last + SCORE_S + SCORE_SHARE * last:
            return False
        self._scored_at = now
        if self._block is None:
            self._copies.append((now, self._copied()))
            return False
        stopped = self._clock()
        self._note_score(now, self._copied()())
        self._paused += self._clock() - stopped
        return self.report.reached_s is not None

    def _note_score(self, seconds: float, score: float) -> None:
        report, target = self.report, self._own.target
        report.curve.append((seconds, score))
        if report.reached_s is None and target is not None:
            report.reached_s = reached(report.curve[-IN_MEAN:], self._own.task, target)

    def _until_next(self) -> int:
        """Blocks until the next decision."""
        if self._block is None or not self.report.steps:
            return 1
        block_s = self._seconds() / self.report.steps * self._block
        return max(1, int(DECIDE_S / block_s))

    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        report = self.report
        if phase == "timed":
            report.warm_up_s = self._seconds()
            report.warm_up_rows, report.warm_up_steps = report.rows, report.steps
            self._start()
        else:
            report.seconds = self._seconds()
            sent, received = carried(self._own.interface)
            report.sent = sent - self._carried[0]
            report.received = received - self._carried[1]
            for at, score in self._copies:
                self._note_score(at, score())
            self._meeting.put(f"report {self._own.rank}", asdict(report))
        self._phase = phase


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of a contestant; without a warm-up, its speed is None.

    Example:
        >>> report = asdict(Report(warm_up_s=1.0, warm_up_rows=192, warm_up_steps=3,
        ...     seconds=2.0, rows=640, steps=10))
        >>> results = summary([report, report])
        >>> [results[name] for name in ("samples_per_s", "from_step")]
        [640.0, 3]
        >>> results["warm_up_samples_per_s"]
        384.0
        >>> scored = asdict(Report(seconds=2.0, rows=640, steps=10))
        >>> print(summary([scored])["warm_up_samples_per_s"])
        None
    """
    first, steps = reports[0], sum(each["steps"] for each in reports)
    warmed_up = all(each["warm_up_s"] > 0 for each in reports)
    return {
        "samples_per_s": sum(each["rows"] / each["seconds"] for each in reports),
        "seconds": first["seconds"],
        "warm_up_samples_per_s": (
            sum(each["warm_up_rows"] / each["warm_up_s"] for each in reports)
            if warmed_up
            else None
        ),
        "warm_up_s": first["warm_up_s"],
        "from_step": first["warm_up_steps"],
        "startup_s": first["startup_s"],
        "steps": steps,
        "sent_kb_per_step": sum(each["sent"] for each in reports) / steps / 1e3,
        "received_kb_per_step": sum(each["received"] for each in reports) / steps / 1e3,
        "curve": first["curve"],
        "reached_s": first["reached_s"],
    }


def print_summary(arguments: Arguments, meeting: Meeting, **more: Any) -> None:
    """When all processes have reported."""
    # Where rank 0 alone has a core of its own, its speed alone counts.
    several = arguments.target is None and arguments.own_core < 0
    wanted = arguments.world if several else 1
    reports = [meeting.get(f"report {rank}") for rank in range(wanted)]
    print(json.dumps(summary(reports) | more), flush=True)


def train(
    arguments: Arguments,
    meeting: Meeting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    block: int | None,
    least: Least = Least(),  # noqa: B008 - a value
    scored: nn.Module | None = None,
) -> None:
    """Train on this rank's rows until the gauge ends it.

    Args:
        scored: The module inside ``model``, if that is a wrapper.
    """
    x, y, x_test, y_test = map(torch.from_numpy, arguments.task.split())
    rng = np.random.default_rng((arguments.seed, arguments.rank))
    mine = slice(arguments.rank, None, arguments.world)
    some = batches(x[mine], y[mine], arguments.task.batch_size, rng)

    def copied() -> Callable[[], float]:
        copy = deepcopy(scored or model)
        return lambda: arguments.task.test(copy, x_test, y_test)

    gauge = Gauge(arguments, meeting, block, copied, least)
    step = plain_step(arguments.task.loss, model, optimizer)
    gauge.begin()
    while gauge.goes_on(arguments.task.batch_size):
        step(*next(some))


def report(arguments: Arguments, meeting: Meeting) -> None:
    """Print the summary on rank 0, whose store the others need until then."""
    if arguments.rank == 0:
        print_summary(arguments, meeting)
    meeting.wait_for_all("end")
