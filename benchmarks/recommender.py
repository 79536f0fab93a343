"""Do rows that are touched rarely learn as well?

Question: With sparse gradients of embeddings, how well does a recommender of two towers
          learn, compared with synchronous training with as many examples?
Counted:  Mean squared error on 20,000 ratings that were not trained on, after 5 epochs
          over 120,000 ratings of 3,000 users and 1,500 items, a few of which have most;
          the ratings are made up. Batches of 64 rows for each replica. "synchronous"
          has one batch of all replicas in each step, "one process" has as many more
          steps as there would be replicas. Replicas are threads of one process.
          `to sync`: percent of its error, more is better.
Baseline: synchronous training.
Run:      python -m benchmarks recommender --replicas 2 4
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import daskdl
from benchmarks.report import bars
from benchmarks.results import Question

USERS, ITEMS, WIDTH = 3000, 1500, 16
BATCH, EPOCHS = 64, 5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, WIDTH, sparse=True)
        self.item = nn.Embedding(ITEMS, WIDTH, sparse=True)
        for embedding in (self.user, self.item):
            nn.init.normal_(embedding.weight, std=0.3)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
            for _ in range(2)
        )

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        user, item = self.user(pairs[:, 0]), self.item(pairs[:, 1])
        first, second = self.towers
        return ((user + first(user)) * (item + second(item))).sum(1)


def ratings() -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """A function that draws pairs of a user and an item, and their ratings."""
    rng = np.random.default_rng(0)
    tastes, kinds = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    kind, generous = 0.3 * rng.normal(size=USERS), 0.3 * rng.normal(size=ITEMS)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        user = (USERS * rng.random(count) ** 2).astype(np.int64)
        item = (ITEMS * rng.random(count) ** 3).astype(np.int64)
        liked = (tastes[user] * kinds[item]).sum(1) / 2
        noise = 0.3 * rng.normal(size=count)
        y = liked + kind[user] + generous[item] + noise
        return np.stack([user, item], 1), y.astype(np.float32)

    return draw


WAYS: dict[str, Callable[[int], daskdl.TrainingMaster]] = {
    "one process": lambda _: daskdl.GradientSharing(),
    "synchronous": lambda _: daskdl.GradientSharing(),
    "daskdl": lambda n: daskdl.GradientSharing(replicas_per_worker=n),
    "daskdl, averaging": lambda n: daskdl.ParameterAveraging(
        frequency=16, replicas_per_worker=n
    ),
}


def error(way: str, optimizer: str, replicas: int, seed: int) -> float:
    draw = ratings()
    (x, y), test = draw(120_000), draw(20_000)
    trainer = daskdl.Trainer(
        Towers,
        nn.MSELoss(),
        OPTIMIZERS[optimizer],
        master=WAYS[way](replicas),
        client=False,
        seed=seed,
        progress=False,
    )
    rows = BATCH * replicas if way == "synchronous" else BATCH
    trainer.fit(x, y, epochs=EPOCHS, batch_size=rows)
    return float(trainer.evaluate(*test)["loss"])


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    for optimizer in OPTIMIZERS:
        for replicas in asked.replicas:
            losses = {
                way: [error(way, optimizer, replicas, seed) for seed in asked.seeds]
                for way in WAYS
            }
            base = losses["synchronous"]
            for way, errors in losses.items():
                pairs = zip(errors, base, strict=True)
                gains = [100 * (1 - loss / base) for loss, base in pairs]
                yield {
                    "optimizer": optimizer,
                    "replicas": replicas,
                    "way": way,
                    "error": statistics.mean(errors),
                    "to_sync": statistics.mean(gains),
                    "worst": min(gains),
                }


QUESTION = Question(
    "recommender",
    __doc__,
    rows,
    "optimizer replicas way error:.3f to_sync:+.1f worst:+.1f",
    {
        "--replicas": {"nargs": "+", "type": int, "default": [2, 4]},
        "--seeds": [0, 1, 2],
    },
    lambda result: bars(result, "error", "way", group="optimizer"),
)
