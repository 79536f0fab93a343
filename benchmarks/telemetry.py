"""What rows of steps cost while training.

Question: what share of training goes into the rows of steps, with `telemetry_every` at
          its default, on a model whose steps are short and on one whose are not?
Counted:  seconds of the training threads inside all that makes rows, or times for them
          what a step does (`MAKERS` of `benchmarks.row_time`), over the seconds that
          these threads train. `fit` of two epochs, 2 replicas as worker processes with
          one torch thread each. The counting itself is in it. Speeds with and without
          rows are not compared: on the machine of the tables they differ by a tenth
          from run to run, ten times what is looked for. Baseline: no rows.
Run:      python -m benchmarks.telemetry --rounds 5
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl
from benchmarks.models import mlp
from benchmarks.row_time import count, taken
from benchmarks.step import BATCH, samples, sgd

SHORT_STEPS = 5  # times as many, of the small model
CASES = {"auto": "auto", "every step": 1, "none": None}


@dataclass(frozen=True)
class Row:
    model: str
    case: str
    step_ms: float  # median over rounds
    share: float  # of the training threads' time, median over rounds
    largest: float  # of the rounds
    rows_per_epoch: float  # of each replica


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


class Fit:
    """`fit` on two worker processes."""

    def __init__(self, client: Client, model: Callable[[], nn.Module], steps: int):
        self._client = client
        self._model = model
        self._steps = steps
        self._data = samples(steps * BATCH * 2)

    def measure(self, every: Any) -> tuple[float, float, float]:
        """Milliseconds of a step, the share of rows in it, and how many there are."""
        trainer = daskdl.Trainer(
            self._model,
            nn.CrossEntropyLoss(),
            sgd,
            client=self._client,
            progress=False,
            telemetry_every=every,
        )
        self._client.run(taken)
        history = trainer.fit(*self._data, epochs=2, batch_size=BATCH)
        rows_s = sum(self._client.run(taken).values())
        trained_s = sum(row["seconds"] for row in history)
        step_ms = 1000 * trained_s / (2 * self._steps)
        return step_ms, rows_s / (2 * trained_s), len(history.steps) / 4


def table(client: Client, steps: int, rounds: int) -> Iterator[Row]:
    models = {
        "784-16-10": Fit(client, small, SHORT_STEPS * steps),
        "784-2048-2048-10": Fit(client, mlp, steps),
    }
    for name, fit in models.items():
        fit.measure(None)  # compiles, and starts what is started once
        for case, every in CASES.items():
            found = [fit.measure(every) for _ in range(rounds)]
            step_ms, shares, counts = zip(*found, strict=True)
            yield Row(
                name,
                case,
                statistics.median(step_ms),
                statistics.median(shares),
                max(shares),
                statistics.median(counts),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=150, help="steps per epoch and replica"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()

    print(f"# torch {torch.__version__}, {platform.machine()}, 1 thread per process")
    print(
        f"{'model':18}{'rows':12}{'step ms':>9}{'share':>9}{'largest':>9}"
        f"{'rows/epoch':>12}"
    )
    rows = []
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as own,
        Client(own, set_as_default=False) as client,
    ):
        client.run(count)
        for row in table(client, arguments.steps, arguments.rounds):
            rows.append(row)
            print(
                f"{row.model:18}{row.case:12}{row.step_ms:>9.2f}{row.share:>9.2%}"
                f"{row.largest:>9.2%}{row.rows_per_epoch:>12.1f}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
