"""Failures on purpose, for tests and to see what a cluster of one's own survives."""

import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from typing_extensions import override

from daskdl.callbacks.base import Callback, Step
from daskdl.errors import OptionError

KINDS = ("raise", "exit", "sleep", "freeze", "drop")
EXIT_CODE = 1

# Run by another process, since a frozen one cannot wake itself.
WAKE = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
time.sleep(seconds)
if os.getppid() == pid:
    os.kill(pid, signal.SIGCONT)
"""


def _home() -> tuple[str, int]:
    return platform.node(), os.getpid()


@dataclass(frozen=True)
class FailureInjection(Callback):
    """Let chosen replicas fail at chosen steps, or with a probability.

    ========  ==========================================================
    kind      what happens in the replica
    ========  ==========================================================
    raise     a `RuntimeError`, as if the user's own code had raised it
    exit      its process ends at once, as if it had been killed
    sleep     it does nothing for `seconds`, but its worker answers
    freeze    its process stops (SIGSTOP; not on Windows), for `seconds` or
              until somebody continues it
    drop      an update of it does not arrive at another replica
    ========  ==========================================================

    A failure follows the step it was chosen for. Chance depends on `seed`, the
    replica's number and the step's alone, so it is the same in every run. A replica
    that comes back after its worker was started again has a new number.

    What is dropped is asked for again, and then comes. With the routing ``"plain"``
    only its origin has it: if that is lost meanwhile, the run cannot go on.

    Args:
        kind: What happens.
        replicas: Numbers of those that fail; None: all.
        steps: Numbers of the steps, from 1, as in :class:`Step`; for ``"drop"`` of
            the replica's updates, from 1. None: all.
        probability: With which each of these fails, in (0, 1]; for ``"drop"`` drawn
            for each other replica that it goes to.
        times: How often each replica fails at most; for ``"drop"``, how many updates
            of each replica do not arrive at each other one. None: no bound.
        seconds: For ``"sleep"``, and for ``"freeze"`` if it ends.
        seed: Of the chance.

    Raises:
        OptionError: If an argument is outside what is allowed; while it trains, if
            ``"exit"`` or ``"freeze"`` would hit the client's own process, and for
            ``"drop"`` with ``client=False``, where no message can get lost.

    Example:
        >>> rule = FailureInjection("raise", replicas=[1], probability=0.5, times=2)
        >>> [number for number in range(1, 20) if rule.strikes(1, number)]
        [1, 4]
    """

    kind: Literal["raise", "exit", "sleep", "freeze", "drop"]
    _: KW_ONLY
    replicas: Collection[int] | None = None
    steps: Collection[int] | None = None
    probability: float = 1.0
    times: int | None = None
    seconds: float | None = None
    seed: int = 0
    _made_in: tuple[str, int] = field(
        default_factory=_home, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            allowed = ", ".join(map(repr, KINDS))
            raise OptionError(f"kind must be one of {allowed}, got {self.kind!r}")
        _check_numbers("replicas", self.replicas, 0)
        _check_numbers("steps", self.steps, 1)
        if not _is_number(self.probability) or not 0 < self.probability <= 1:
            raise OptionError(
                f"probability must be in (0, 1], got {self.probability!r}; to spare "
                "some replicas or steps, name the others"
            )
        if self.times is not None and not _is_whole(self.times, 1):
            raise OptionError(
                f"times must be a whole number >= 1 or None, got {self.times!r}"
            )
        if not _is_whole(self.seed, 0):
            raise OptionError(f"seed must be a whole number >= 0, got {self.seed!r}")
        self._check_seconds()

    def _check_seconds(self) -> None:
        seconds = self.seconds
        if self.kind not in ("sleep", "freeze"):
            if seconds is not None:
                raise OptionError(
                    f"seconds is for 'sleep' and 'freeze' only, got {seconds!r} with "
                    f"{self.kind!r}; leave it out"
                )
            return
        if seconds is None and self.kind == "freeze":
            return
        if not _is_number(seconds) or not 0 < float(seconds or 0) < float("inf"):
            other = "" if self.kind == "sleep" else " or None"
            raise OptionError(f"seconds must be a number > 0{other}, got {seconds!r}")

    def strikes(self, replica: int, number: int, receiver: int | None = None) -> bool:
        """Whether a replica fails at a step.

        Args:
            replica: Its number.
            number: Of the step; with a receiver, of the update.
            receiver: The replica at which the update does not arrive.
        """
        if self.replicas is not None and replica not in self.replicas:
            return False
        if not self._chosen(replica, number, receiver):
            return False
        if self.times is None:
            return True
        # Not counted where it happens: then it would not be a plain value.
        earlier = 0
        for other in range(1, number):
            earlier += self._chosen(replica, other, receiver)
            if earlier == self.times:
                return False
        return True

    def _chosen(self, replica: int, number: int, receiver: int | None) -> bool:
        if self.steps is not None and number not in self.steps:
            return False
        if self.probability == 1:
            return True
        drawn = random.Random(f"{self.seed} {replica} {number} {receiver}").random()
        return drawn < self.probability

    @override
    def on_step_end(self, step: Step) -> None:
        if self.kind != "drop" and self.strikes(step.replica, step.number):
            self._fail(step)

    def _fail(self, step: Step) -> None:
        if self.kind == "raise":
            raise RuntimeError(
                f"replica {step.replica} fails at step {step.number}, as {self} says"
            )
        if self.kind == "sleep":
            assert self.seconds is not None
            time.sleep(self.seconds)
            return
        if self._made_in == _home():
            raise OptionError(
                f"kind={self.kind!r} would hit the client's own process, in which the "
                "workers are threads; take workers that are processes, as in "
                "LocalCluster(processes=True)"
            )
        if self.kind == "exit":
            os._exit(EXIT_CODE)
        freeze(self.seconds)


def freeze(seconds: float | None) -> None:
    """Stop this process; another one wakes it after so many seconds, None: nobody."""
    waker = None
    if seconds is not None:
        waker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WAKE, str(os.getpid()), str(seconds)]
        )
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def _check_numbers(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        remedy = f"; write [{value!r}]" if _is_whole(value, least) else ""
        raise OptionError(
            f"{name} must be a list of whole numbers >= {least} or None, got "
            f"{value!r}{remedy}"
        )
    if not value:
        raise OptionError(f"{name} must not be empty; for all of them give None")
    wrong = [number for number in value if not _is_whole(number, least)]
    if wrong:
        raise OptionError(
            f"{name} must be whole numbers >= {least}, got {wrong[0]!r} among them"
        )


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
