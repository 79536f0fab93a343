"""What is made of a model's outputs, and where they go.

What comes out for one example: learned from two, and held against all others.

A model asked about rows, wherever they are.

What a model says to data, computed by all workers.

Numpy in, numpy out; torch in, torch out; a lazy collection in, a lazy one out.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from distributed import Client
from torch import Tensor, nn

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
from daskdl.data.checks import (
    MISFITS,
    check_module,
    forward,
    random_state_left_alone,
    rehearsed_batch,
    rows_like,
)
from daskdl.data.dask_collections import Collections, is_bag, is_lazy, is_lazy_list
from daskdl.data.distribute import each_part, workers_of
from daskdl.data.export import token_of
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.source import Source, rows_of_part
from daskdl.data.storage import Store, is_url, store_of
from daskdl.data.tables import InMemory, as_numpy
from daskdl.data.torch_datasets import split_stream
from daskdl.errors import ModelError, OptionError
from daskdl.inference.lazy import Examples, Noted, lazy_outputs, with_first_rows
from daskdl.inference.predictions import (
    LazyBlocks,
    Predictions,
    Target,
    origin_of_predictions,
    write_lazy,
    write_parts,
)
from daskdl.serialization import PackedModel
from daskdl.util import freed_memory_kept

SAME = "same"

Postprocess = Callable[[Tree], Tree]


@dataclass(frozen=True)
class OutputOptions:
    """Arguments of `predict` about what comes out; refused here if they are wrong.

    Attributes:
        output: ``"same"``: returned, as the kind that came in; else a folder, a URL of
            fsspec or a path, to write to.
        postprocess: Of the outputs of a batch, on the worker, or None.
        keyed: Whether examples of bags and lists have keys; None: it is seen.
        storage_options: Of the file system of the URL, for fsspec.
        names: Of the columns of a single table, if there are as many.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> OutputOptions("arrays")
        Traceback (most recent call last):
        daskdl.errors.OptionError: output must be 'same' or a folder, as a URL or a \
path with a slash, got 'arrays'
    """

    output: str | os.PathLike[str] = SAME
    postprocess: Postprocess | None = None
    keyed: bool | None = None
    storage_options: Mapping[str, Any] | None = None
    names: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        _check_output(self.output)
        if self.postprocess is not None and not callable(self.postprocess):
            raise OptionError(
                "postprocess must be a function of the outputs of a batch, or None, "
                f"got {self.postprocess!r}"
            )
        if self.keyed not in (True, False, None):
            raise OptionError(f"keyed must be True, False or None, got {self.keyed!r}")

    @property
    def writes(self) -> bool:
        """Whether the outputs are written to files."""
        return self.output != SAME

    @property
    def store(self) -> Store:
        """Where they are written to."""
        return Store(store_of(self.output).url, dict(self.storage_options or {}))

    @property
    def decisive(self) -> dict[str, Any]:
        """What tells these options from others, as plain values."""
        names = None if self.names is None else list(map(str, self.names))
        return {"keyed": self.keyed, "names": names}


def _check_output(output: Any) -> None:
    named = isinstance(output, os.PathLike) or is_url(output)
    slashed = isinstance(output, str) and ("/" in output or os.sep in output)
    if not (named or slashed or output == SAME):
        raise OptionError(
            "output must be 'same' or a folder, as a URL or a path with a slash, got "
            f"{output!r}"
        )


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


AS_COMPUTED = OutputOptions()
# What is sent, asked about and fetched costs 20 ms a part, whatever its size. Enough
# parts that none computes alone for long while the first are sent, or in the end.
PARTS_PER_THREAD = 4


def predict(
    model: nn.Module,
    X: Any,
    read: ReadOptions,
    client: Client | Literal[False],
    wanted: OutputOptions = AS_COMPUTED,
) -> Any:
    """Run a model over data, with every worker doing a part.

    The model runs in evaluation mode, on a copy that travels once to each worker.

    Args:
        model: Gives one tensor, or tuples and dicts of tensors, whose first axis is
            that of its input; or what `postprocess` makes such of. Not changed.
        X: Examples, of any kind; labels that come with them are passed over.
        read: How they are read.
        client: A synchronous client; False: in this process.
        wanted: What comes out, and where to.

    Returns:
        One output per example, in the order of ``X``, and lazy if ``X`` is. Lazy ones
        are computed when asked for, by whichever scheduler does that; with a client,
        its cluster holds the model as long as the result lives. Bfloat16 outputs are
        float32 in numpy and in Dask, which do not have it. Or `Predictions`, if they
        are written.

    Raises:
        DataError: If X cannot be used.
        ModelError: If the model does not fit X, or does not give one row per example.
        OptionError: If the client or another option cannot be used.

    Example:
        >>> predict(nn.Identity(), np.array([[1.0], [2.0]]), ReadOptions(2), False)
        array([[1.],
               [2.]], dtype=float32)
    """
    check_module(model)
    if client is not False:
        workers = len(workers_of(client))
    source = with_first_rows(_source(X, read, wanted.keyed), client)
    packed = PackedModel(model, here=client is False and not is_lazy(X))
    asking = _asking(packed, source, read, wanted)
    if client is not False and not is_lazy(X):
        source = split_stream(source, workers)
    if wanted.writes:
        return _written(model, X, source, asking, wanted, client)
    if is_lazy(X):
        assert isinstance(source, Collections)
        nothing = empty(asking.form)
        return lazy_outputs(
            X, source, asking.outputs, nothing, client, names=wanted.names
        )
    if client is not False and isinstance(source, InMemory):
        source = source.in_parts(PARTS_PER_THREAD * sum(client.nthreads().values()))
    parts = dict(each_part(source, asking, client, send=True))
    outputs = batching.joined([parts[part] for part in sorted(parts)])
    if not all(isinstance(leaf, Tensor) for leaf in _leaves(X)):
        return outputs
    return batching.mapped(_as_tensor, asking.form, outputs)


def _source(X: Any, read: ReadOptions, keyed: bool | None) -> Source:
    if is_bag(X) or is_lazy_list(X):
        source_of(X, None, read.source(None, labelled=False))  # refuses wrong options
        return Examples(X, keyed)
    if keyed:
        raise OptionError(
            "keyed=True is for a bag, or a list of Delayed objects and futures, of "
            f"pairs (key, x); got a {type(X).__name__}"
        )
    return source_of(X, None, read.source(None, labelled=False))


def _asking(
    packed: PackedModel, source: Source, read: ReadOptions, wanted: OutputOptions
) -> Asking:
    x, _ = rows_like(source)
    form = form_of(packed.unpack(), x, read.transform, wanted.postprocess)
    return Asking(
        packed,
        form,
        read.batch_size,
        read.transform,
        wanted.postprocess,
        exact=not isinstance(source, Examples),
    )


def _written(
    model: nn.Module,
    X: Any,
    source: Source,
    asking: Asking,
    wanted: OutputOptions,
    client: Client | Literal[False],
) -> Predictions:
    options = asking.decisive | wanted.decisive
    target = Target(wanted.store, origin_of_predictions(model, source, X, options))
    found = target.finished()
    if found is not None:
        return found
    if isinstance(source, Collections):
        lazy = LazyBlocks(X, source, asking.outputs, empty(asking.form), wanted.names)
        return write_lazy(lazy, target, client)
    return write_parts(source, asking, empty(asking.form), target, client)


def _as_tensor(boxed: list[Form], outputs: np.ndarray) -> Tensor:
    return torch.from_numpy(outputs).to(boxed[0].dtype)


def _leaves(X: Any) -> list[Any]:
    return batching.leaves(X) if isinstance(X, tuple | dict) else [X]
