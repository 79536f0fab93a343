"""Seconds that a process spends on the rows of steps; see :mod:`benchmarks.telemetry`.

A module of its own, so that a worker imports it, and has one list of what was spent.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from daskdl.training.gradient_sharing import GradientSharingExchange
from daskdl.training.telemetry import StepLog

MAKERS = {
    StepLog: ("due", "add", "take"),
    GradientSharingExchange: ("step_stats",),
}

spent_s: list[float] = []  # in this process, since it was cleared


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent_s.append(time.perf_counter() - began)

    return call


def count() -> None:
    """Count in this process what `MAKERS` take."""
    for owner, names in MAKERS.items():
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))


def taken() -> float:
    """Seconds since the last call."""
    total = sum(spent_s)
    spent_s.clear()
    return total
