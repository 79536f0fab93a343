"""What a model says to data, computed by all workers.

Numpy in, numpy out; torch in, torch out; a lazy collection in, a lazy one out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from distributed import Client
from torch import Tensor, nn

from daskdl.data import trees
from daskdl.data.arrays import as_numpy
from daskdl.data.batches import (
    Transform,
    auto_device,
    batches,
    floating_dtype,
    inputs_to_device,
    rows_in,
    whole,
)
from daskdl.data.checks import rows_like
from daskdl.data.collections import Collections, is_lazy
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.faults import UNREADABLE
from daskdl.data.futures import workers_of
from daskdl.data.looking import looked_at
from daskdl.data.models import check_module
from daskdl.data.options import ReadOptions
from daskdl.data.passes import each_part
from daskdl.data.rehearsal import (
    forward,
    random_state_left_alone,
    rehearsed_batch,
)
from daskdl.data.source import Source, rows_of_part
from daskdl.data.sources import source_of
from daskdl.data.trees import Rows, Tree
from daskdl.errors import ModelError
from daskdl.lazy_outputs import lazy_outputs
from daskdl.packed import PackedModel


@dataclass(frozen=True)
class Asking:
    """Asks a model for what it says to rows; picklable.

    Attributes:
        model: Gives trees of tensors with one row per example. Not changed.
        form: What comes out for one example, a tree of `Form`.
        batch_size: Rows per forward pass.
        transform: What is made of each batch before, or None.
    """

    model: PackedModel
    form: Tree  # of lists of one `Form`: a tuple would be a tree
    batch_size: int
    transform: Transform | None

    def __call__(self, source: Source, part: int) -> Tree:
        """The outputs of a part, as numpy arrays."""
        try:
            return self.outputs(rows_of_part(source, part, self.batch_size))
        except UNREADABLE as error:
            error.add_note(f"in {source.name(part)}")
            raise

    def outputs(self, parts: Iterator[Rows]) -> Tree:
        """The outputs of parts, one after the other, as numpy arrays.

        Raises:
            ModelError: If they have another form than those of the first rows.
        """
        device = auto_device()
        module = self.model.module(lambda copy: copy.eval().to(device))
        dtype = floating_dtype(module)
        chunks = (whole((x, None)) for x, _ in parts)
        made = [self.empty()]
        with torch.inference_mode():
            for batch in batches(chunks, self.batch_size):
                x, _ = batch if self.transform is None else self.transform(batch)
                output = module(inputs_to_device(x, device, dtype))
                made.append(self._checked(output, rows_in(batch)))
        return trees.joined(made)

    def empty(self) -> Tree:
        """The outputs of no rows."""
        return trees.mapped(lambda boxed: boxed[0].empty(0), self.form)

    def _checked(self, output: Any, rows: int) -> Tree:
        def checked(boxed: list["Form"], leaf: Any) -> np.ndarray:
            (form,) = boxed
            if not isinstance(leaf, Tensor) or leaf.shape != (rows, *form.shape):
                shown = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                raise ModelError(
                    f"model gave the shape {shown} for {rows} rows, after "
                    f"{form.shape} for each of the first"
                )
            return as_numpy(leaf)

        try:
            return trees.mapped(checked, self.form, output)
        except ValueError as error:
            raise ModelError(f"model gave outputs unlike the first: {error}") from error


class Form(NamedTuple):
    """What comes out for one example, in one place of the model's outputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, rows: int) -> np.ndarray:
        """The form as numpy knows it, without the numbers."""
        return as_numpy(torch.empty((rows, *self.shape), dtype=self.dtype))


def predict(
    model: nn.Module, X: Any, read: ReadOptions, client: Client | Literal[False]
) -> Any:
    """Run a model over data, with every worker doing a part.

    The model runs in evaluation mode, on a copy that travels once to each worker.

    Args:
        model: Gives one tensor, or tuples and dicts of tensors, whose first axis is
            that of its input. Not changed.
        X: Examples, of any kind; labels that come with them are passed over.
        read: How they are read.
        client: A synchronous client; False: in this process.

    Returns:
        One output per example, in the order of ``X``, and lazy if ``X`` is. Lazy ones
        are computed when asked for, by whichever scheduler does that; with a client,
        its cluster holds the model as long as the result lives. Bfloat16 outputs are
        float32 in numpy and in Dask, which do not have it.

    Raises:
        DataError: If X cannot be used.
        ModelError: If the model does not fit X, or does not give one row per example.
        OptionError: If the client cannot be used.

    Example:
        >>> predict(nn.Identity(), np.array([[1.0], [2.0]]), ReadOptions(2), False)
        array([[1.],
               [2.]], dtype=float32)
    """
    check_module(model)
    if client is not False:
        workers = len(workers_of(client))
    source = source_of(X, None, read.source(None, labelled=False))
    if source.first is None:
        source = looked_at(source, client)
    packed = PackedModel(model)
    asking = Asking(
        packed, _form(packed, source, read), read.batch_size, read.transform
    )
    if is_lazy(X):
        assert isinstance(source, Collections)
        return lazy_outputs(X, source, asking.outputs, asking.empty(), client)
    if client is not False:
        source = sharded(source, workers)
    parts = dict(each_part(source, asking, client, send=True))
    outputs = trees.joined([parts[part] for part in sorted(parts)])
    if not all(isinstance(leaf, Tensor) for leaf in _leaves(X)):
        return outputs
    return trees.mapped(_as_tensor, asking.form, outputs)


def _as_tensor(boxed: list[Form], outputs: np.ndarray) -> Tensor:
    return torch.from_numpy(outputs).to(boxed[0].dtype)


def _leaves(X: Any) -> list[Any]:
    return trees.leaves(X) if isinstance(X, tuple | dict) else [X]


def _form(packed: PackedModel, source: Source, read: ReadOptions) -> Tree:
    """What comes out for one example, from two rows."""
    module = packed.unpack().eval()
    with random_state_left_alone():
        x, _ = rehearsed_batch(module, rows_like(source)[0], None, read.transform)
        output = forward(module, x)

    def form(leaf: Any) -> list[Form]:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
            raise ModelError(
                "model must give one tensor with one row per example to predict, or "
                f"tuples and dicts of such, got {got} for two rows"
            )
        return [Form(tuple(leaf.shape[1:]), leaf.dtype)]  # a tuple would be a tree

    rows = rows_in((x, None))
    return trees.mapped(form, output)
