"""Models, their data, and how they are trained, the same for all contestants.

The data come with scikit-learn and Python: images of digits, enlarged to MNIST's shape
and each drawn at several places; a table of diabetes patients; the text of Python's
standard library. Where only speed counts, rows are made up. Scikit-learn is imported by
those who make its rows: that takes seconds, and workers read theirs from files.
"""

import functools
import itertools
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 64
WIDTH = 2048


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Module:
    """5.8 million parameters, 23.3 MB of gradient."""
    return perceptron(784, WIDTH, WIDTH, 10)


def cnn() -> nn.Module:
    """Two convolutions on images of 28 by 28: 20 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


ASCII = 128  # characters


class Split(NamedTuple):
    """Rows to learn from, and rows to be tested on."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Task:
    """A model, its data, and how one process trains it."""

    name: str
    model: Callable[[], nn.Module]
    loss: nn.Module
    split: Callable[[], Split]
    batch_size: int
    epochs: int
    score: str  # ``"accuracy"`` or ``"loss"``, on the test rows
    # of SGD, momentum and AdamW, the best for one process by thirds of decades
    learning_rates: tuple[float, float, float]

    def optimizer(
        self, name: str, rate_factor: float = 1.0
    ) -> Callable[[Any], torch.optim.Optimizer]:
        rates = dict(zip(OPTIMIZERS, self.learning_rates, strict=True))
        return functools.partial(OPTIMIZERS[name], lr=rate_factor * rates[name])

    def better(self, score: float, best: float) -> bool:
        """Whether a score is at least as good as another.

        Example:
            >>> WORKS["mlp"].better(0.95, 0.9), WORKS["characters"].better(2.1, 2.0)
            (True, False)
        """
        return score >= best if self.score == "accuracy" else score <= best

    def test(self, model: nn.Module, x: Tensor, y: Tensor) -> float:
        """Score of a model, whose mode is kept."""
        training = model.training
        model.eval()
        with torch.no_grad():
            output = model(x)
        model.train(training)
        if self.score == "accuracy":
            return float((output.argmax(1) == y).double().mean())
        return float(self.loss(output, y))


CROSS_ENTROPY = nn.CrossEntropyLoss()


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
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(
        (x / 16).astype(np.float32), y, test_size=0.5, stratify=y, random_state=0
    )
    return Split(parts[0], parts[2], parts[1], parts[3])


def regressor() -> nn.Module:
    return perceptron(10, 64, 1)


def diabetes() -> Split:
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

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
        self.character = nn.Embedding(ASCII, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, ASCII)

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
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.before(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.between(x))


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


SIDE = 28  # of an image, as MNIST has it
DIGIT = 24  # of what is drawn on it
COPIES = 40  # of each image to learn from, at different places


def images(shape: tuple[int, ...]) -> Split:
    """Digits of 28 by 28 pixels: 53,880 to learn from, 450 others to be tested on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.25, stratify=y, random_state=0)
    x, x_test, y, y_test = parts
    rng = np.random.default_rng(0)
    return Split(
        _drawn(np.tile(x, (COPIES, 1)), rng).reshape(-1, *shape),
        np.tile(y, COPIES),
        _drawn(x_test, rng).reshape(-1, *shape),
        y_test,
    )


def _drawn(small: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Images of 8 by 8 pixels, enlarged, each at a place of its own."""
    pixels = torch.from_numpy(small.astype(np.float32)).reshape(-1, 1, 8, 8)
    large = nn.functional.interpolate(pixels, (DIGIT, DIGIT), mode="bilinear")
    canvas = np.zeros((len(small), SIDE, SIDE), np.float32)
    places = rng.integers(0, SIDE - DIGIT + 1, (len(small), 2))
    for patch, image, (top, left) in zip(
        canvas, large[:, 0].numpy(), places, strict=True
    ):
        patch[top : top + DIGIT, left : left + DIGIT] = image
    return canvas


def lines() -> Split:
    """Of Python's library: 10,000 lines to learn from, 128 others to be tested on."""
    whole = text(lines=12_000)
    return whole._replace(x_test=whole.x_test[:128], y_test=whole.y_test[:128])


def long_text() -> Split:
    """Of Python's library: 20,000 lines to learn from, 1,000 others to be tested on."""
    whole = text(lines=24_000)
    return whole._replace(x_test=whole.x_test[:1000], y_test=whole.y_test[:1000])


TASKS = {
    "digits": Task(
        *("digits", small_cnn, CROSS_ENTROPY, digits, 16, 12),
        *("accuracy", (0.1, 0.03, 0.003)),
    ),
    "diabetes": Task(
        *("diabetes", regressor, nn.MSELoss(), diabetes, 8, 40),
        *("loss", (0.003, 0.0003, 0.0003)),
    ),
    "text": Task(
        *("text", NextCharacter, CROSS_ENTROPY, text, 8, 2),
        *("loss", (0.3, 0.03, 0.001)),
    ),
    "long-text": Task(
        *("long-text", NextCharacter, CROSS_ENTROPY, long_text, 16, 2),
        *("loss", (0.3, 0.03, 0.001)),
    ),
    "images": Task(
        *("images", cnn, CROSS_ENTROPY, functools.partial(images, (1, SIDE, SIDE))),
        *(BATCH, 2, "accuracy", (0.1, 0.01, 0.001)),
    ),
}


def characters() -> nn.Module:
    """A transformer of 3.1 million parameters that says which character comes next."""
    return NextCharacter(width=352)


WORKS = {
    "mlp": Task(
        *("mlp", mlp, CROSS_ENTROPY, functools.partial(images, (SIDE * SIDE,))),
        *(BATCH, 1, "accuracy", (0.05, 0.005, 0.0003)),
    ),
    "cnn": Task(
        *("cnn", cnn, CROSS_ENTROPY, functools.partial(images, (1, SIDE, SIDE))),
        *(BATCH, 1, "accuracy", (0.1, 0.01, 0.001)),
    ),
    "characters": Task(
        *("characters", characters, CROSS_ENTROPY, lines),
        *(16, 2, "loss", (0.3, 0.03, 0.001)),
    ),
}


# ---- training, as PyTorch's documentation has it


def batches(
    x: Tensor, y: Tensor, size: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches, in a new random order in each epoch, without an end."""
    while True:
        order = torch.from_numpy(rng.permutation(len(x)))
        for rows in order[: len(x) // size * size].split(size):
            yield x[rows], y[rows]


def plain_step(
    loss: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], None]:
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def plain_speed(
    step: Callable[[Tensor, Tensor], None],
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
) -> float:
    """Steps per second, after a tenth of them that is not counted."""
    for _ in range(1 + steps // 10):
        step(*next(data))
    began = time.perf_counter()
    for _ in range(steps):
        step(*next(data))
    return steps / (time.perf_counter() - began)


# ---- the MLP on made-up rows, where only speed counts


def samples(count: int, features: int = 784) -> tuple[np.ndarray, np.ndarray]:
    """Ten noisy classes."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(10, features))
    y = rng.integers(0, 10, count)
    x = centers[y] + rng.normal(size=(count, features))
    return x.astype(np.float32), y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)
