"""Real problems that come with the machine: images, a table, text.

Each is split once into rows to learn from and rows to be tested on.
"""

import functools
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import nn

BYTES = 128  # of ASCII; text holds nothing else


class Split(NamedTuple):
    """Rows to learn from, and rows to be tested on."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained by one process.

    Attributes:
        score: What counts at the end: ``"accuracy"`` or ``"loss"``, on the test rows.
        rates: Learning rate by optimizer, the best of one process by thirds of decades.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: nn.Module
    split: Callable[[], Split]
    batch_size: int
    epochs: int
    score: str
    rates: Mapping[str, float]

    def optimizer(self, name: str) -> Callable[[Any], torch.optim.Optimizer]:
        """One of ``rates`` by its name."""
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "SGD": torch.optim.SGD,
            "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
            "AdamW": torch.optim.AdamW,
        }
        return functools.partial(kinds[name], lr=self.rates[name])


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def digits() -> Split:
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(
        (x / 16).astype(np.float32), y, test_size=0.5, stratify=y, random_state=0
    )
    return Split(parts[0], parts[2], parts[1], parts[3])


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))


def diabetes() -> Split:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    x, x_test, y, y_test = train_test_split(
        x.astype(np.float32), y.astype(np.float32)[:, None], random_state=0
    )
    mean, deviation = x.mean(0), x.std(0)
    center, width = y.mean(), y.std()
    return Split(
        (x - mean) / deviation,
        (y - center) / width,
        (x_test - mean) / deviation,
        (y_test - center) / width,
    )


class NextCharacter(nn.Module):
    """A small transformer that says for each character of a line what comes next."""

    def __init__(self, length: int = 32, width: int = 208) -> None:
        super().__init__()
        self.character = nn.Embedding(BYTES, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.character(x) + self.place)
        return self.head(self.norm(hidden)).transpose(1, 2)


class Block(nn.Module):
    """Attention to what came before, and a layer of each character's own."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.own = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.before(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.own(self.between(x))


def text(length: int = 32, lines: int = 1800) -> Split:
    """Pieces of the Python standard library, each with itself one character later."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    whole = "".join(p.read_text("ascii", "ignore") for p in sorted(folder.glob("*.py")))
    codes = np.frombuffer(whole.encode(), np.uint8)[: lines * length + 1].astype(int)
    x = codes[:-1].reshape(lines, length)
    y = codes[1:].reshape(lines, length)
    order = np.random.default_rng(0).permutation(lines)
    test, train = np.split(order, [lines // 6])
    return Split(x[train], y[train], x[test], y[test])


TASKS = {
    task.name: task
    for task in (
        Task(
            "digits",
            small_cnn,
            nn.CrossEntropyLoss(),
            digits,
            batch_size=16,
            epochs=12,
            score="accuracy",
            rates={"SGD": 0.1, "momentum": 0.03, "AdamW": 0.003},
        ),
        Task(
            "diabetes",
            regressor,
            nn.MSELoss(),
            diabetes,
            batch_size=8,
            epochs=40,
            score="loss",
            rates={"SGD": 0.003, "momentum": 0.0003, "AdamW": 0.0003},
        ),
        Task(
            "text",
            NextCharacter,
            nn.CrossEntropyLoss(),
            text,
            batch_size=8,
            epochs=2,
            score="loss",
            rates={"SGD": 0.3, "momentum": 0.03, "AdamW": 0.001},
        ),
    )
}
