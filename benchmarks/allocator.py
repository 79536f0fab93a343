"""What the allocator settings of Dask's nanny cost a training step.

Question: is it worth keeping freed memory while a replica trains?
Counted:  samples/s of the plain loop of step.py in a process of its own, in turn:
          as a shell starts it, as Dask's nanny starts workers
          (MALLOC_TRIM_THRESHOLD_=65536), and the same with `freed_memory_kept`; then
          in another thread than the first, as workers train, without and with what
          keeps the heaps of threads. Pages that were mapped for each step, too.
Run:      python -m benchmarks.allocator
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from typing import NamedTuple

import torch


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
from daskdl import memory

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    print(f"# torch {torch.__version__}, {platform.machine()}, 1 thread")
    print(f"{'setting':40}{'samples/s':>10}{'lowest':>8}{'pages/step':>12}")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for _ in range(arguments.rounds):
        for name, setting in SETTINGS.items():
            found[name].append(measured(setting, arguments.steps))
    for name, runs in found.items():
        rates, faults = zip(*runs, strict=True)
        print(
            f"{name:40}{statistics.median(rates):>10,.0f}{min(rates):>8,.0f}"
            f"{statistics.median(faults):>12,.0f}"
        )


if __name__ == "__main__":
    main()
