"""What comes out for one example: learned from two, and held against all others."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from daskdl.data import batching
from daskdl.data.arrays import as_numpy
from daskdl.data.batching import Transform, Tree, rows_in
from daskdl.data.rehearsal import (
    MISFITS,
    forward,
    random_state_left_alone,
    rehearsed_batch,
)
from daskdl.errors import ModelError
from daskdl.inference.options import Postprocess


class Form(NamedTuple):
    """What comes out for one example, in one place of the outputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> np.ndarray:
        """The outputs of no rows, as numpy knows them."""
        return as_numpy(torch.empty((0, *self.shape), dtype=self.dtype))


def form_of(
    module: nn.Module,
    x: Tree,
    transform: Transform | None,
    postprocess: Postprocess | None,
) -> Tree:
    """What comes out, from two rows: a tree of lists of one `Form`.

    Args:
        module: A copy on the CPU.
        x: Rows of arrays, of which two are taken.
        transform: What is made of each batch before, or None.
        postprocess: What is made of the outputs, or None.

    Raises:
        ModelError: If one of them fails, or there is not one row per example.
    """
    with random_state_left_alone():
        batch = rehearsed_batch(module.eval(), x, None, transform)
        output = forward(module, batch[0])
        if postprocess is not None:
            output = _rehearsed(postprocess, output)
    rows = rows_in(batch)
    blamed = "model" if postprocess is None else "postprocess"
    if not isinstance(output, dict | tuple | Tensor) or not batching.leaves(output):
        raise _refusal(blamed, type(output))

    def form(leaf: Any) -> list[Form]:
        if not isinstance(leaf, Tensor):
            raise _refusal(blamed, type(leaf))
        if leaf.ndim == 0 or len(leaf) != rows:
            raise _refusal(blamed, tuple(leaf.shape))
        return [Form(tuple(leaf.shape[1:]), leaf.dtype)]  # a tuple would be a tree

    return batching.mapped(form, output)


def empty(form: Tree) -> Tree:
    """The outputs of no rows."""
    return batching.mapped(lambda boxed: boxed[0].empty(), form)


def as_formed(form: Tree, output: Any, rows: int, *, exact: bool) -> Tree:
    """Outputs as numpy arrays, if they are as those that the form was learned from.

    Args:
        form: See `form_of`.
        output: Of a batch.
        rows: Of the batch.
        exact: Whether each row must have the shape of the first; else it may be another
            for each batch, with as many axes.

    Raises:
        ModelError: If they are not.
    """

    def checked(boxed: list[Form], leaf: Any) -> np.ndarray:
        (form,) = boxed
        alike = isinstance(leaf, Tensor) and (
            leaf.shape == (rows, *form.shape)
            if exact
            else leaf.ndim == 1 + len(form.shape) and len(leaf) == rows
        )
        if not alike:
            shown = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
            raise ModelError(
                f"model gave the shape {shown} for {rows} rows, after "
                f"{form.shape} for each of the first"
            )
        return as_numpy(leaf)

    try:
        return batching.mapped(checked, form, output)
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model gave outputs unlike the first: {error}") from error


def _rehearsed(postprocess: Postprocess, output: Any) -> Any:
    try:
        with torch.no_grad():
            return postprocess(output)
    except MISFITS as error:
        raise ModelError(
            f"postprocess failed on the outputs of two rows, {_shown(output)}: {error}"
        ) from error


def _shown(output: Any) -> str:
    if isinstance(output, dict | tuple):
        return ", ".join(
            f"{n}: {_shown(x)}" for n, x in batching.named(output, "output")
        )
    if isinstance(output, Tensor):
        return f"shape {tuple(output.shape)} and dtype {output.dtype}"
    return f"a {type(output).__name__}"


def _refusal(blamed: str, got: Any) -> ModelError:
    remedy = "" if blamed == "postprocess" else "; a postprocess may choose from others"
    return ModelError(
        f"{blamed} must give one tensor with one row per example to predict, or tuples "
        f"and dicts of such, got {got} for two rows{remedy}"
    )
