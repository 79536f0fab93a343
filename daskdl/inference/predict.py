"""`predict`: a dry run on two rows, then all workers apply the model to the data.

Outputs are of the same kind as the data: numpy, torch, pandas, or lazy collections.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from distributed import Client
from torch import Tensor, nn

from daskdl.config import is_whole
from daskdl.data import batching, checks, unreadable
from daskdl.data.batching import Rows, Transform, Tree
from daskdl.data.dask_collections import Collections
from daskdl.data.distribute import map_parts, workers_of
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.source import Source
from daskdl.data.tables import as_numpy
from daskdl.errors import ModelError, OptionError
from daskdl.inference.lazy import (
    check_tabular,
    error_context,
    keyed_by_file,
    lazy_outputs,
    pandas_of,
    with_first_rows,
)
from daskdl.objective import call, picked
from daskdl.process_settings import (
    device_name,
    device_to_evaluate_on,
    freed_memory_kept,
)
from daskdl.serialization import PackedModel
from daskdl.util import (
    check_installed,
    check_outlives,
    client_or_process,
)

Postprocess = Callable[[Tree], Tree]

# Sending, computing and fetching a part takes 20 ms, however small it is. With this
# number of parts, all threads are busy while the first parts are sent, and at the end.
PARTS_PER_THREAD = 4


def predict(
    model: nn.Module,
    X: Any,
    read: ReadOptions,
    client: Client | Literal[False] | None,
    *,
    output: str | int | None = None,
    postprocess: Postprocess | None = None,
    keyed: bool | None = None,
    device: str | torch.device = "auto",
    names: Sequence[Any] | None = None,
) -> Any:
    """Apply a model to every row; see :func:`daskdl.predict`.

    `names` are the names of the columns, if the outputs are one table with as many
    columns.
    """
    _check_options(output, postprocess, keyed)
    checks.check_module(model)
    source = source_of(X, None, read, labelled=False)
    if keyed and not (source.has_part_names or source.keyable):
        raise OptionError(
            "keyed=True applies only to files, and to a bag, or a list of Delayed "
            f"objects and futures, of pairs (key, x); got a {type(X).__name__}"
        )
    by_file = source.has_part_names and keyed is True
    lazy = source.lazy or by_file
    if lazy:
        check_outlives(client)
    with client_or_process(client) as cluster:
        if cluster is not False:
            check_installed(cluster)
            workers_of(cluster)  # raises an error if there are none
        source = with_first_rows(source, cluster, keyed)
        packed = PackedModel(model, here=cluster is False and not lazy)
        empty = empty_outputs(
            packed.unpack(), source, read.transform, output, postprocess
        )
        predictor = BatchPredictor(
            packed,
            empty,
            read.batch_size,
            read.transform,
            output,
            postprocess,
            exact=not source.keyable,  # examples may have different shapes
            device=device_name(device),
        )
        empty_arrays = batching.tree_map(as_numpy, empty)
        if by_file:
            return keyed_by_file(source, predictor.outputs, cluster)
        if isinstance(source, Collections):
            outputs = lazy_outputs(
                source, predictor.outputs, empty_arrays, cluster, names=names
            )
            single = isinstance(outputs, list) and not isinstance(X, list)
            return outputs[0] if single else outputs
        is_pandas = source.in_memory and hasattr(X, "iloc")
        if is_pandas:
            check_tabular(empty_arrays, "pandas.DataFrame; use X.to_numpy()")
        if cluster is not False:
            source = source.divided(1)  # otherwise outputs would be in no order
            threads = sum(cluster.nthreads().values())
            source = source.in_parts(PARTS_PER_THREAD * threads)
        parts = dict(map_parts(source, predictor, cluster, send=True))
    outputs = batching.joined([parts[part] for part in sorted(parts)])
    if is_pandas:
        return pandas_of(outputs, X, names)
    if not source.in_memory or not all(
        isinstance(x, Tensor) for x in batching.leaves(X)
    ):
        return outputs
    return batching.tree_map(
        lambda leaf, array: torch.from_numpy(array).to(leaf.dtype), empty, outputs
    )


def check_output(output: Any) -> None:
    """Raise an OptionError unless the argument is a name, a position or None."""
    if not (output is None or isinstance(output, str) or is_whole(output)):
        raise OptionError(
            "output must be the name or position of one of the model's outputs, or "
            f"None for all, got {output!r}"
        )


def _check_options(
    output: Any, postprocess: Postprocess | None, keyed: bool | None
) -> None:
    check_output(output)
    if postprocess is not None and not callable(postprocess):
        raise OptionError(
            "postprocess must be a function of the outputs of a batch, or None, got "
            f"{postprocess!r}"
        )
    if keyed not in (True, False, None):
        raise OptionError(f"keyed must be True, False or None, got {keyed!r}")


def empty_outputs(
    module: nn.Module,
    source: Source,
    transform: Transform | None,
    which: str | int | None,
    postprocess: Postprocess | None,
) -> Tree:
    """Return the outputs for zero rows, tensors, from a dry run on two rows."""
    with checks.preserved_random_state():
        rows = None if source.first_rows is None else (source.first_rows[0], None)
        run = checks.dry_run(module, rows, transform)
        output = picked(run.output, which)
        if postprocess is not None:
            shown = checks.described(output)
            try:
                with torch.no_grad():
                    output = postprocess(output)
            except unreadable.USER_ERRORS as error:
                raise ModelError(
                    f"postprocess failed on the outputs of two rows, {shown}: {error}"
                ) from error
    count = batching.length(run.batch)

    def unsuitable(got: Any) -> ModelError:
        culprit, remedy = "postprocess", ""
        if postprocess is None:
            culprit = "model"
            remedy = "; select one of several outputs by name or position, output=..."
        return ModelError(
            f"{culprit} must return a tensor with one row per example, or tuples and "
            f"dicts of such tensors, got {got} for two rows{remedy}"
        )

    leaves = batching.leaves(output)
    if not isinstance(output, Mapping | tuple | Tensor) or not leaves:
        raise unsuitable(type(output))
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise unsuitable(type(leaf))
        if leaf.ndim == 0 or len(leaf) != count:
            raise unsuitable(tuple(leaf.shape))
    empty = [
        torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype, device="cpu")
        for leaf in leaves
    ]
    return batching.with_leaves(output, empty)


@dataclass(frozen=True)
class BatchPredictor:
    """Picklable: applies a model batch by batch.

    The threads of a process share the tensors of the model.
    """

    model: PackedModel
    empty: Tree  # outputs for zero rows, tensors
    batch_size: int
    transform: Transform | None
    which: str | int | None  # name or position of an output; None: all
    postprocess: Postprocess | None
    exact: bool  # False: batches may differ in the shapes of their outputs
    device: str  # see `device_to_evaluate_on`

    def __call__(self, source: Source, part: int) -> Tree:
        """Return the outputs for a part, numpy arrays."""
        with error_context(f"in {source.name(part)}"):
            return self.outputs(source.stream(part, self.batch_size))

    def outputs(self, blocks: Iterator[Rows]) -> Tree:
        """Return the joined outputs for blocks of rows, numpy arrays."""
        device = device_to_evaluate_on(self.device)
        self.model.opened(lambda copy: copy.eval().to(device))
        module = self.model.module()
        dtype = batching.floating_dtype(module)
        chunks = (batching.all_rows((x, None)) for x, _ in blocks)
        outputs = []
        with freed_memory_kept(), torch.inference_mode():
            for batch in batching.batches(chunks, self.batch_size):
                x, _ = batch if self.transform is None else self.transform(batch)
                output = call(module, batching.inputs_to_device(x, device, dtype))
                output = picked(output, self.which)
                if self.postprocess is not None:
                    with error_context("in postprocess"):
                        output = self.postprocess(output)
                outputs.append(self._checked(output, batching.length(batch)))
        if not outputs:
            return batching.tree_map(as_numpy, self.empty)
        return batching.joined(outputs)

    def _checked(self, output: Any, rows: int) -> Tree:
        """Return the outputs of a batch as numpy arrays, structured as in `empty`."""

        def array(expected: Tensor, leaf: Any) -> np.ndarray:
            shape = tuple(expected.shape[1:])
            matches = isinstance(leaf, Tensor) and (
                leaf.shape == (rows, *shape)
                if self.exact
                else leaf.ndim == expected.ndim and len(leaf) == rows
            )
            if not matches:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                remedy = ""
                if rows == 1 and isinstance(leaf, Tensor) and leaf.ndim < expected.ndim:
                    remedy = (
                        "; squeeze() removes the axis of rows if there is a single "
                        "row, so write squeeze(-1)"
                    )
                raise ModelError(
                    f"model returned the shape {got} for {rows} rows, but {shape} per "
                    f"row in the dry run{remedy}"
                )
            return as_numpy(leaf)

        try:
            batching.tree_map(lambda *_: None, self.empty, output)
        except ValueError as error:
            raise ModelError(
                "model returned outputs of a different structure than in the dry run: "
                f"{error}"
            ) from error
        return batching.tree_map(array, self.empty, output)
