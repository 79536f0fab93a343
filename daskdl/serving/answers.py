"""What a model says to a batch, and each caller's own part of it."""

import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daskdl.data import batching
from daskdl.data.arrays import as_numpy
from daskdl.data.batching import Tree
from daskdl.errors import DaskDLError, ModelError
from daskdl.serving.calls import Call


class Outputs(NamedTuple):
    """What a model says to the rows of a batch."""

    tree: Tree  # of numpy arrays
    dtypes: tuple[str, ...]  # that torch gave them, by leaf: numpy has no bfloat16

    @classmethod
    def of(cls, outputs: Any, rows: int) -> "Outputs":
        """Check what a model returned for so many rows.

        Raises:
            ModelError: If it is not one tensor with one row for each, or a tree of
                such.

        Example:
            >>> Outputs.of(torch.zeros(2), rows=2)
            Outputs(tree=array([0., 0.], dtype=float32), dtypes=('float32',))
        """
        for leaf in batching.leaves(outputs):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                raise ModelError(
                    "model must give one tensor with one row per example, or tuples "
                    f"and dicts of such, got {got} for {rows} rows"
                )
        dtypes = [str(leaf.dtype) for leaf in batching.leaves(outputs)]
        return cls(
            batching.mapped(as_numpy, outputs),
            tuple(name.removeprefix("torch.") for name in dtypes),
        )


class Failure(NamedTuple):
    """What a model, or a transform, raised."""

    summary: str
    details: str  # the traceback, where it happened

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe it, without holding on to the frames it went through."""
        name = "" if isinstance(error, DaskDLError) else f"{type(error).__name__}: "
        return cls(f"{name}{error}", "".join(traceback.format_exception(error)))

    def error(self, what: str) -> ModelError:
        """The same for whoever asked.

        Args:
            what: Was done, for the message.
        """
        error = ModelError(f"{what}: {self.summary}")
        error.add_note(f"where it happened:\n{self.details}")
        return error


def inputs_of(calls: Sequence[Call]) -> Tree:
    """The rows of calls of one kind, one after the other."""
    return batching.joined([call.x for call in calls])


def answers_of(outputs: Outputs, calls: Sequence[Call]) -> list[Tree]:
    """What each of the calls is answered, in memory of its own."""
    answers, start = [], 0
    for call in calls:
        own = batching.rows(outputs.tree, slice(start, start + call.rows))
        start += call.rows
        if len(calls) > 1:
            own = batching.mapped(np.copy, own)
        answers.append(_tensors(own, outputs.dtypes) if call.tensors else own)
    return answers


def _tensors(tree: Tree, dtypes: Sequence[str]) -> Tree:
    made = [
        torch.from_numpy(leaf).to(getattr(torch, dtype))
        for leaf, dtype in zip(batching.leaves(tree), dtypes, strict=True)
    ]
    return batching.filled(tree, made)
