"""The work that all contestants do alike: a model, its data, and how it is trained.

Real data that come with the machine, so that an accuracy means something: the images of
scikit-learn's digits, enlarged to MNIST's shape and each drawn at several places, and
the text of Python's standard library.
"""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from benchmarks import tasks
from benchmarks.models import cnn, mlp
from benchmarks.tasks import Split, Task

SIDE = 28  # of an image, as MNIST has it
DIGIT = 24  # of what is drawn on it
COPIES = 40  # of each image to learn from, at different places


def images(shape: tuple[int, ...]) -> Split:
    """Digits of 28 by 28 pixels: 53,880 to learn from, 450 others to be tested on."""
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
    for own, image, (top, left) in zip(
        canvas, large[:, 0].numpy(), places, strict=True
    ):
        own[top : top + DIGIT, left : left + DIGIT] = image
    return canvas


def lines() -> Split:
    """Of Python's library: 10,000 lines to learn from, 128 others to be tested on."""
    whole = tasks.text(lines=12_000)
    return whole._replace(x_test=whole.x_test[:128], y_test=whole.y_test[:128])


def characters() -> nn.Module:
    """A transformer of 3.1 million parameters that says which character comes next."""
    return tasks.NextCharacter(width=352)


WORKS = {
    work.name: work
    for work in (
        Task(
            "mlp",
            mlp,
            nn.CrossEntropyLoss(),
            functools.partial(images, (SIDE * SIDE,)),
            batch_size=64,
            epochs=1,
            score="accuracy",
            rates={"SGD": 0.05, "momentum": 0.005, "AdamW": 0.0003},
        ),
        Task(
            "cnn",
            cnn,
            nn.CrossEntropyLoss(),
            functools.partial(images, (1, SIDE, SIDE)),
            batch_size=64,
            epochs=1,
            score="accuracy",
            rates={"SGD": 0.1, "momentum": 0.01, "AdamW": 0.001},
        ),
        Task(
            "characters",
            characters,
            nn.CrossEntropyLoss(),
            lines,
            batch_size=16,
            epochs=2,
            score="loss",
            rates={"SGD": 0.3, "momentum": 0.03, "AdamW": 0.001},
        ),
    )
}


def batches(
    x: Tensor, y: Tensor, size: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches in a new random order in each epoch, without an end."""
    while True:
        order = torch.from_numpy(rng.permutation(len(x)))
        for rows in order[: len(x) // size * size].split(size):
            yield x[rows], y[rows]


def score(work: Task, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy or loss on rows that were not trained on; the model's mode is kept."""
    was = model.training
    model.eval()
    with torch.no_grad():
        output = model(x)
    model.train(was)
    if work.score == "accuracy":
        return float((output.argmax(1) == y).double().mean())
    return float(work.loss(output, y))


def reaches(work: Task, own: float, target: float) -> bool:
    """Whether a score is as good as a target.

    Example:
        >>> reaches(WORKS["mlp"], 0.95, 0.9), reaches(WORKS["characters"], 2.1, 2.0)
        (True, False)
    """
    return own >= target if work.score == "accuracy" else own <= target
