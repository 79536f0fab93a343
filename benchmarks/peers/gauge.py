"""What is measured in each process, alike for all contestants.

Training begins when all are ready: what it took until then is the start-up. A part of
it, the warm-up, is not counted. Then rows are counted, and the bytes of this host's
interface, for so many seconds; or the model is scored now and then, until it is as good
as a target.

Contestants whose processes train in step go on or end together: rank 0 decides, at the
end of a block of steps at which all meet anyway, and the others hear of it there. While
rank 0 scores the model they wait, and the clock stands. Contestants that do not train
in step decide each for itself, and the clock runs on while rank 0 scores.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.arguments import Arguments
from benchmarks.peers.meeting import Meeting
from benchmarks.work import reaches

DECIDE_S = 0.25  # of training between two decisions, at most a block's time more
SCORE_S, SCORE_SHARE = 1.0, 0.05  # between two scores: seconds, and share of the time


class Least(NamedTuple):
    """Steps that one process has to make, however long they take."""

    warm_up: int = 1
    counted: int = 1


@dataclass
class Report:
    """What one process found in the part that counts.

    Attributes:
        startup_s: From the start of the contestant until all were ready.
        warm_up_s: Of training that is not counted.
        seconds: Of training that is.
        rows: That it trained on meanwhile.
        steps: It made meanwhile.
        sent: Bytes that its host's interface sent meanwhile.
        received: Likewise.
        curve: Seconds of training and score.
        reached_s: Seconds of training until the target; None: it was not reached.
    """

    startup_s: float = 0.0
    warm_up_s: float = 0.0
    seconds: float = 0.0
    rows: int = 0
    steps: int = 0
    sent: int = 0
    received: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    reached_s: float | None = None


def carried(interface: str) -> tuple[int, int]:
    """Bytes that an interface of this host has sent and received."""
    folder = Path("/sys/class/net", interface, "statistics")
    sent, received = (
        int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")
    )
    return sent, received


class Gauge:
    """Counts the steps of one process, and says when it is enough.

    Args:
        own: Of this process.
        meeting: With the others.
        block: Steps after which all meet, where they train in step; None: never.
        score: Of the model as it is now.
        least: Steps there have to be, however long they take.
        clock: In seconds.
    """

    def __init__(
        self,
        own: Arguments,
        meeting: Meeting,
        block: int | None,
        score: Callable[[], float],
        least: Least = Least(),  # noqa: B008 - a value
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own, self._meeting, self._block, self._score = own, meeting, block, score
        self._least = least
        self._clock, self._paused = clock, 0.0
        self._phase = "warm-up" if own.target is None else "timed"
        self._made, self._next, self._blocks = 0, 0, 0
        self.report = Report()

    def begin(self) -> None:
        """Wait until all are ready: now training begins."""
        self._meeting.wait_for_all("begin")
        self.report.startup_s = time.time() - self._own.began
        self._start()

    def goes_on(self, rows: int) -> bool:
        """Call it before each step, with the rows of that: whether to make it."""
        if self._made == self._next and self._phase != "over":
            self._decide()
        if self._phase == "over":
            return False
        self._made += 1
        self.report.rows += rows
        self.report.steps += 1
        return True

    def _start(self) -> None:
        """Begin to count."""
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
                self._meeting.say(name, decided)
            else:
                decided = self._meeting.hear(name)
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
        if self._own.target is not None and self._scores(self._own.target):
            return "over"
        least = 1 if self._own.target is not None else self._least.counted
        enough = self._seconds() >= self._own.seconds and self.report.steps >= least
        return "over" if enough else "timed"

    def _scores(self, target: float) -> bool:
        """Score the model if it is time to; whether the target is reached."""
        if self._own.rank > 0:
            return False
        curve, now = self.report.curve, self._seconds()
        last = curve[-1][0] if curve else 0.0
        if now < last + SCORE_S + SCORE_SHARE * last:
            return False
        stopped = self._clock()
        score = self._score()
        if self._block is not None:
            self._paused += self._clock() - stopped
        curve.append((now, score))
        if reaches(self._own.task, score, target):
            self.report.reached_s = now
        return self.report.reached_s is not None

    def _until_next(self) -> int:
        """Blocks until the next decision."""
        if self._block is None or not self.report.steps:
            return 1
        block_s = self._seconds() / self.report.steps * self._block
        return max(1, int(DECIDE_S / block_s))

    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        if phase == "timed":
            self.report.warm_up_s = self._seconds()
            self._start()
        else:
            self.report.seconds = self._seconds()
            sent, received = carried(self._own.interface)
            self.report.sent = sent - self._carried[0]
            self.report.received = received - self._carried[1]
            self._meeting.say(f"report {self._own.rank}", asdict(self.report))
        self._phase = phase
