"""What the allocator settings of Dask's nanny cost a training step.

Question: is it worth keeping freed memory while a replica trains?
Counted:  samples/s of the plain loop of step.py in a process of its own, in turn:
          as a shell starts it, as Dask's nanny starts workers
          (MALLOC_TRIM_THRESHOLD_=65536), and the same with `freed_memory_kept`.
Run:      python -m benchmarks.allocator
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys

import torch

SETTINGS = {
    "as a shell starts it (baseline)": ("", False),
    "as Dask's nanny starts workers": ("65536", False),
    "the same, freed memory kept": ("65536", True),
}
PROGRAM = """
from benchmarks.step import plain
print(plain({steps}, kept={kept}))
"""


def samples_per_s(trim: str, kept: bool, steps: int) -> float:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    if trim:
        environment["MALLOC_TRIM_THRESHOLD_"] = trim
    program = PROGRAM.format(kept=kept, steps=steps)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    print(f"# torch {torch.__version__}, {platform.machine()}, 1 thread")
    print(f"{'setting':36}{'samples/s':>10}")
    measured = {setting: [] for setting in SETTINGS}
    for _ in range(arguments.rounds):
        for setting, (trim, kept) in SETTINGS.items():
            rate = samples_per_s(trim, kept, arguments.steps)
            measured[setting].append(rate)
    for setting, rates in measured.items():
        print(f"{setting:36}{statistics.median(rates):>10,.0f}")


if __name__ == "__main__":
    main()
