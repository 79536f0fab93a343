"""A model asked about rows, wherever they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from daskdl.data import batching
from daskdl.data.batching import (
    Rows,
    Transform,
    Tree,
    auto_device,
    batches,
    floating_dtype,
    inputs_to_device,
    rows_in,
    whole,
)
from daskdl.data.exports.origin import token_of
from daskdl.data.source import Source, rows_of_part
from daskdl.inference.form import as_formed, empty
from daskdl.inference.options import Postprocess
from daskdl.outputs.notes import Noted
from daskdl.serialization import PackedModel
from daskdl.util import freed_memory_kept


@dataclass(frozen=True)
class Asking:
    """Asks a model for what it says to rows; picklable.

    Threads of a process that have the same one share the tensors of the model.

    Attributes:
        model: Gives what `postprocess` takes. Not changed.
        form: What comes out for one example, see `form_of`.
        batch_size: Rows per forward pass.
        transform: What is made of each batch before, or None.
        postprocess: What is made of the outputs of each batch, or None.
        exact: Whether all rows have outputs of one shape.
    """

    model: PackedModel
    form: Tree
    batch_size: int
    transform: Transform | None
    postprocess: Postprocess | None
    exact: bool = True

    @property
    def decisive(self) -> dict[str, Any]:
        """What else than model and data decides what comes out, as plain values."""
        functions = {"transform": self.transform, "postprocess": self.postprocess}
        told = {n: None if f is None else token_of(f) for n, f in functions.items()}
        return {"batch_size": int(self.batch_size), **told}

    def __call__(self, source: Source, part: int) -> Tree:
        """The outputs of a part, as numpy arrays."""
        with Noted(f"in {source.name(part)}"):
            return self.outputs(rows_of_part(source, part, self.batch_size))

    def outputs(self, parts: Iterator[Rows]) -> Tree:
        """The outputs of parts, one after the other, as numpy arrays.

        Raises:
            ModelError: If they have another form than those of the first rows.
        """
        device = auto_device()
        self.model.opened(lambda copy: copy.eval().to(device))
        module = self.model.module()
        dtype = floating_dtype(module)
        chunks = (whole((x, None)) for x, _ in parts)
        made = []
        with freed_memory_kept(), torch.inference_mode():
            for batch in batches(chunks, self.batch_size):
                x, _ = batch if self.transform is None else self.transform(batch)
                output = module(inputs_to_device(x, device, dtype))
                made.append(self._finished(output, rows_in(batch)))
        return batching.joined(made) if made else empty(self.form)

    def _finished(self, output: Any, rows: int) -> Tree:
        if self.postprocess is not None:
            with Noted("in postprocess"):
                output = self.postprocess(output)
        return as_formed(self.form, output, rows, exact=self.exact)
