"""What a classifier has guessed for each example of a batch. No Dask, no state.

Only of labels that are one class index for each row: of others there is no one guess.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.data.accuracy import is_classification
from daskdl.data.batching import Tree
from daskdl.data.rehearsal import ignored_label
from daskdl.keras.losses import CrossEntropyOfProbabilities


class Guesses(NamedTuple):
    """For each row, on the CPU."""

    labels: Tensor  # int64
    predicted: Tensor  # int64, the class with the largest output
    probabilities: Tensor | None  # float64, of the label; None: not known of this loss


def guesses_of(loss: Any, output: Any, y: Tree) -> Guesses | None:
    """Tell what a model has guessed.

    Args:
        loss: Says what the outputs are: of `CrossEntropyLoss` logits, of `NLLLoss`
            logarithms of probabilities.
        output: Of the model; None if it is not known.
        y: The labels.

    Returns:
        None unless the labels are one class index for each row. A label that is
        ignored has the probability NaN.

    Example:
        >>> output = torch.tensor([[0.25, 0.75]]).log()
        >>> guesses_of(nn.NLLLoss(), output, torch.tensor([0]))
        Guesses(labels=tensor([0]), predicted=tensor([1]), \
probabilities=tensor([0.2500], dtype=torch.float64))
    """
    if not is_classification(output, y) or y.ndim != 1:
        return None
    predicted = output.argmax(dim=1)
    chances = _chances(loss, output)
    if chances is not None:
        chances = _of_labels(chances, y).cpu()
    return Guesses(y.cpu(), predicted.cpu(), chances)


def ignored(loss: Any, y: Tree) -> Tensor | None:
    """Which rows have nothing but labels that a loss passes over; None: it has none.

    Example:
        >>> ignored(nn.CrossEntropyLoss(ignore_index=9), torch.tensor([[9, 9], [0, 9]]))
        tensor([ True, False])
    """
    label = ignored_label(loss)
    if label is None or not isinstance(y, Tensor) or y.is_floating_point():
        return None
    return (y == label).reshape(len(y), -1).all(dim=1).cpu()


def _chances(loss: Any, output: Tensor) -> Tensor | None:
    """Probabilities of the classes, if the loss says what its outputs are."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(loss, nn.CrossEntropyLoss) or function is functional.cross_entropy:
        return output.double().softmax(dim=1)
    if isinstance(loss, CrossEntropyOfProbabilities):
        return output.double()
    if type(loss) is nn.NLLLoss or function is functional.nll_loss:
        return output.double().exp()
    return None


def _of_labels(chances: Tensor, y: Tensor) -> Tensor:
    known = (y >= 0) & (y < chances.shape[1])
    picked = chances.gather(1, y.where(known, 0)[:, None])[:, 0]
    return picked.where(known, torch.nan)
