"""What rows of steps cost while training.

Question: how much slower is training with `telemetry_every` at its default than with
          no rows at all, on a model whose steps are short and on one whose are not?
Counted:  examples per second of the last of two epochs of `fit`, 2 replicas as worker
          processes with one torch thread each; the first epoch is not counted, so that
          the threshold has adapted. With and without rows in turns, in one run, who
          begins changing with each round; the ratio is the median over the rounds of
          that of neighbours. Baseline: no rows, and the same against itself, which
          says how much of a ratio is noise.
Run:      python -m benchmarks.telemetry --rounds 15
"""

import argparse
import json
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl
from benchmarks.step import BATCH, mlp, samples, sgd

SHORT_STEPS = 5  # times as many, of the small model
CASES = {"auto": "auto", "every step": 1, "none again": None}


@dataclass(frozen=True)
class Row:
    model: str
    case: str
    samples_per_s: float  # of both replicas together, median over rounds
    ratio: float  # to no rows, median over rounds
    lowest: float  # of the middle half of the ratios
    highest: float
    rows_per_epoch: float  # of each replica


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


class Fit:
    """`fit` on two worker processes."""

    def __init__(self, client: Client, model, steps: int) -> None:
        self._client = client
        self._model = model
        self._data = samples(steps * BATCH * 2)

    def measure(self, every) -> tuple[float, float]:
        trainer = daskdl.Trainer(
            self._model,
            nn.CrossEntropyLoss(),
            sgd,
            client=self._client,
            progress=False,
            telemetry_every=every,
        )
        history = trainer.fit(*self._data, epochs=2, batch_size=BATCH)
        return history[-1]["examples_per_s"], len(history.steps) / 4


def table(client: Client, steps: int, rounds: int) -> Iterator[Row]:
    models = {
        "784-16-10": Fit(client, small, SHORT_STEPS * steps),
        "784-2048-2048-10": Fit(client, mlp, steps),
    }
    for name, fit in models.items():
        fit.measure(None)  # compiles, and starts what is started once
        for case, every in CASES.items():
            yield compare(name, case, fit, every, rounds)


def compare(name: str, case: str, fit: Fit, every, rounds: int) -> Row:
    rates, ratios, counts = [], [], []
    for i in range(rounds):
        first, second = (every, None) if i % 2 else (None, every)
        taken = [fit.measure(first), fit.measure(second)]
        (rate, count), (base, _) = taken if i % 2 else reversed(taken)
        rates.append(rate)
        ratios.append(rate / base)
        counts.append(count)
    middle = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    return Row(
        name,
        case,
        statistics.median(rates),
        statistics.median(ratios),
        middle[0],
        middle[-1],
        statistics.median(counts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=150, help="steps per epoch and replica"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()

    print(f"# torch {torch.__version__}, {platform.machine()}, 1 thread per process")
    print(
        f"{'model':18}{'rows':12}{'samples/s':>10}{'ratio':>8}{'middle half':>16}"
        f"{'rows/epoch':>12}"
    )
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster, set_as_default=False) as client:
        rows = []
        for row in table(client, arguments.steps, arguments.rounds):
            rows.append(row)
            print(
                f"{row.model:18}{row.case:12}{row.samples_per_s:>10,.0f}"
                f"{row.ratio:>8.3f}{row.lowest:>8.3f}{row.highest:>8.3f}"
                f"{row.rows_per_epoch:>12.1f}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
