"""Scores rows one by one, wherever they are. No Dask.

What a batch comes to is in :mod:`daskdl.per_example.losses`; how parts are gone through
on a cluster is in :mod:`daskdl.per_example.scores`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from daskdl.data import batching
from daskdl.data.batching import (
    Batch,
    Rows,
    Transform,
    auto_device,
    batches,
    floating_dtype,
    rows_in,
    to_device,
    whole,
)
from daskdl.errors import ModelError
from daskdl.objective import Objective, OwnStep, on_device
from daskdl.per_example.guesses import Guesses, guesses_of, ignored
from daskdl.per_example.losses import example_losses
from daskdl.serialization import Packed, PackedModel


class Guessed(NamedTuple):
    """As `daskdl.per_example.guesses.Guesses`, in numpy's arrays."""

    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray | None


class Scored(NamedTuple):
    """What a model did on each of some rows."""

    scores: np.ndarray  # float64
    ignored: np.ndarray  # bool, whether the loss passes over all labels of a row
    guessed: Guessed | None  # None: there is no one class index for each row


@dataclass(frozen=True)
class ExampleScorer:
    """Scores each of some rows; picklable.

    Attributes:
        model: Not changed.
        loss: What is made of its outputs, or a step.
        batch_size: Rows per forward pass, where there is one for several rows.
        transform: What is made of each batch before, or None.
        by_rows: Whether outputs have a row for each of the batch.
        penalty: Added to each score.
    """

    model: PackedModel
    loss: Packed[Objective]
    batch_size: int
    transform: Transform | None
    by_rows: bool
    penalty: float

    def scored(self, rows: Rows) -> Scored:
        """Score rows, in order; there may be none.

        Raises:
            ModelError: If the transform changes how many rows there are.
        """
        device = auto_device()
        module = self.model.module(lambda copy: copy.eval().to(device))
        loss = self.loss.shared(lambda copy: on_device(copy, device))
        dtype = floating_dtype(module)
        made = [
            self._scored(
                module, loss, to_device(*self._transformed(batch), device, dtype)
            )
            for batch in batches([whole(rows)], self.batch_size)
        ]
        return joined(made)

    def _transformed(self, batch: Batch) -> Batch:
        if self.transform is None:
            return batch
        rows = rows_in(batch)
        made = self.transform(batch)
        check_rows_kept(made, rows)
        return made

    def _scored(self, module: nn.Module, loss: Objective, batch: Batch) -> Scored:
        # What a step of the user's own computes may need gradients with respect to x.
        own = isinstance(loss, OwnStep)
        with torch.no_grad() if own else torch.inference_mode():
            losses, output = example_losses(module, loss, batch, by_rows=self.by_rows)
            found = guesses_of(loss, output, batch[1])
            passed = ignored(loss, batch[1])
        return Scored(
            losses.numpy() + self.penalty,
            np.zeros(len(losses), bool) if passed is None else passed.numpy(),
            None if found is None else _guessed(found),
        )


def check_rows_kept(made: Batch, rows: int) -> None:
    """Refuse what a transform has made of a batch, if it has other rows.

    Raises:
        ModelError: With the shape that has not as many rows as there were.
    """
    for leaf in batching.named_both(made).values():
        if tuple(leaf.shape[:1]) != (rows,):
            raise ModelError(
                "transform must return as many rows as it gets, so that each has a "
                f"score, got the shape {tuple(leaf.shape)} for {rows} rows"
            )


def joined(scored: Sequence[Scored]) -> Scored:
    """One after the other.

    Example:
        >>> joined([])
        Scored(scores=array([], dtype=float64), ignored=array([], dtype=bool), \
guessed=None)
    """
    scores = np.concatenate([np.zeros(0), *(own.scores for own in scored)])
    passed = np.concatenate([np.zeros(0, bool), *(own.ignored for own in scored)])
    guessed = [own.guessed for own in scored if own.guessed is not None]
    if not guessed or len(guessed) < len(scored):
        return Scored(scores, passed, None)
    columns = list(zip(*guessed, strict=True))
    return Scored(scores, passed, Guessed(*map(_column, columns)))


def _column(parts: Sequence[Any]) -> Any:
    return None if any(part is None for part in parts) else np.concatenate(parts)


def _guessed(found: Guesses) -> Guessed:
    chances = found.probabilities
    return Guessed(
        found.labels.numpy(),
        found.predicted.numpy(),
        None if chances is None else chances.numpy(),
    )
