"""What the allocator settings of Dask's nanny cost a training step.

Question: is it worth keeping freed memory while a replica trains?
Counted:  samples/s of the plain loop of step.py in a process of its own, in turn:
          as a shell starts it, as Dask's nanny starts workers
          (MALLOC_TRIM_THRESHOLD_=65536), and the same with `freed_memory_kept`; then
          in another thread than the first, as workers train, without and with what
          keeps the heaps of threads. Pages that were mapped for each step, too.
Run:      python -m benchmarks allocator
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.results import Question


class Setting(NamedTuple):
    """How the loop runs."""

    trim: str = "65536"  # MALLOC_TRIM_THRESHOLD_
    kept: bool = True  # freed memory
    heaps: bool = True  # that of threads, too
    thread: bool = False  # another than the first


SETTINGS = {
    "as a shell starts it (baseline)": Setting(trim="", kept=False),
    "as Dask's nanny starts workers": Setting(kept=False),
    "the same, freed memory kept": Setting(),
    "in a thread, heaps of threads not kept": Setting(heaps=False, thread=True),
    "in a thread, freed memory kept": Setting(thread=True),
}
PROGRAM = """
import resource
from concurrent.futures import ThreadPoolExecutor
from benchmarks.step import plain
from daskdl import util as memory

kept, heaps, thread, steps = {kept}, {heaps}, {thread}, {steps}
if not heaps:
    others = [one for one in memory.SETTINGS if one.variable != "MALLOC_TOP_PAD_"]
    memory.SETTINGS = tuple(others)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def measure():
    plain(1, kept)
    before = faults()
    rate = plain(steps, kept)
    return rate, (faults() - before) / (2 * steps)

print(*(ThreadPoolExecutor(1).submit(measure).result() if thread else measure()))
"""


def measured(setting: Setting, steps: int) -> tuple[float, float]:
    """Samples/s, and pages mapped for each step."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    if setting.trim:
        environment["MALLOC_TRIM_THRESHOLD_"] = setting.trim
    program = PROGRAM.format(**setting._asdict(), steps=steps)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rate, faults = map(float, done.stdout.split())
    return rate, faults


def rows(asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for _ in range(asked.rounds):
        for name, setting in SETTINGS.items():
            found[name].append(measured(setting, asked.steps))
    for name, runs in found.items():
        rates, faults = zip(*runs, strict=True)
        yield {
            "setting": name,
            "samples_per_s": statistics.median(rates),
            "lowest": min(rates),
            "pages_per_step": statistics.median(faults),
        }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)


QUESTION = Question(
    "allocator",
    __doc__,
    options,
    rows,
    {"setting": "", "samples_per_s": ",.0f", "lowest": ",.0f"}
    | {"pages_per_step": ",.0f"},
)
