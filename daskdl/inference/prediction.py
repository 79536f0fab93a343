"""What a model says to data, computed by all workers.

Numpy in, numpy out; torch in, torch out; a lazy collection in, a lazy one out.
"""

from typing import Any, Literal

import numpy as np
import torch
from distributed import Client
from torch import Tensor, nn

from daskdl.data import batching
from daskdl.data.checks import rows_like
from daskdl.data.collections import Collections, is_bag, is_lazy, is_lazy_list
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.futures import workers_of
from daskdl.data.in_memory import InMemory
from daskdl.data.models import check_module
from daskdl.data.options import ReadOptions
from daskdl.data.passes import each_part
from daskdl.data.source import Source
from daskdl.data.sources import source_of
from daskdl.errors import OptionError
from daskdl.inference.asking import Asking
from daskdl.inference.form import Form, empty, form_of
from daskdl.inference.options import OutputOptions
from daskdl.lazy_outputs import lazy_outputs
from daskdl.outputs.examples import Examples
from daskdl.outputs.first_rows import with_first_rows
from daskdl.predictions.origin import origin_of_predictions
from daskdl.predictions.predictions import Predictions
from daskdl.predictions.target import Target
from daskdl.predictions.writing import LazyBlocks, write_lazy, write_parts
from daskdl.serialization import PackedModel

SAME = OutputOptions()
# What is sent, asked about and fetched costs 20 ms a part, whatever its size. Enough
# parts that none computes alone for long while the first are sent, or in the end.
PARTS_PER_THREAD = 4


def predict(
    model: nn.Module,
    X: Any,
    read: ReadOptions,
    client: Client | Literal[False],
    wanted: OutputOptions = SAME,
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
        source = sharded(source, workers)
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
