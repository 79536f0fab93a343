"""What a model says to data, computed by all workers.

Numpy in, numpy out; torch in, torch out; a ``dask.array`` in, a lazy one out.
"""

from typing import Any, NamedTuple

import dask.array
import numpy as np
import torch
from dask.delayed import delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Client
from torch import Tensor, nn

from daskdl.data.arrays import (
    as_numpy,
    check_array,
    check_batch_size,
    is_dask_array,
)
from daskdl.data.batches import auto_device, floating_dtype, inputs_to_device
from daskdl.data.checks import check_module
from daskdl.data.futures import new_key, release, workers_of
from daskdl.data.rehearsal import forward, prepared_rows, random_state_left_alone
from daskdl.data.sources import PIECES_PER_REPLICA, cut
from daskdl.errors import ModelError
from daskdl.packed import PackedModel


class _Form(NamedTuple):
    """What comes out for one example."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, rows: int) -> np.ndarray:
        """The form as numpy knows it, without the numbers."""
        return as_numpy(torch.empty((rows, *self.shape), dtype=self.dtype))


def predict(model: nn.Module, X: Any, client: Client, *, batch_size: int = 64) -> Any:
    """Run a model over data, with every worker doing a part.

    The model runs in evaluation mode, on a copy that travels once to each worker.

    Args:
        model: Gives one tensor whose first axis is that of its input. Not changed.
        X: Examples: a numpy array, a torch tensor or a ``dask.array``.
        client: A synchronous client.
        batch_size: Rows per forward pass, >= 1.

    Returns:
        One output per example, in the order of ``X`` and as the same kind. A
        ``dask.array`` has the row chunks of ``X`` and is computed when asked for, by
        this client, whose cluster holds the model as long as the result lives.
        Bfloat16 outputs are float32 in numpy and in Dask, which do not have it.

    Raises:
        DataError: If X cannot be used, see `check_array`.
        ModelError: If the model does not fit X, or does not give one tensor with
            one row per example.
        OptionError: If the batch size or the client cannot be used.
    """
    check_array(X, "X")
    check_batch_size(batch_size)
    check_module(model)
    workers = workers_of(client)
    packed = PackedModel(model)
    form = _output_form(packed, X)
    name = new_key("model")
    sent = client.scatter({name: packed}, broadcast=True)[name]
    if is_dask_array(X):
        return _lazy(X, sent, form, batch_size)
    try:
        outputs = _in_memory(as_numpy(X), sent, form, batch_size, client, workers)
    finally:
        release([sent])
    return _as_given(X, outputs, form)


def predict_here(model: nn.Module, X: Any, *, batch_size: int = 64) -> Any:
    """The same in this process; arguments as of `predict`.

    The result of a ``dask.array`` is lazy here too: whichever scheduler computes it
    has the model with its tasks.

    Example:
        >>> predict_here(nn.Identity(), np.array([[1.0], [2.0]]))
        array([[1.],
               [2.]], dtype=float32)
    """
    check_array(X, "X")
    check_batch_size(batch_size)
    check_module(model)
    packed = PackedModel(model)
    form = _output_form(packed, X)
    if is_dask_array(X):
        return _lazy(X, packed, form, batch_size)
    outputs = predict_rows(packed, as_numpy(X), form, batch_size)
    return _as_given(X, outputs, form)


def predict_rows(
    model: PackedModel, rows: np.ndarray, form: _Form, batch_size: int
) -> np.ndarray:
    """Run the model over one piece on a worker; the task behind `predict`.

    Raises:
        ModelError: If the outputs have another form than those of the first rows.
    """
    device = auto_device()
    module = model.module(lambda copy: copy.eval().to(device))
    dtype = floating_dtype(module)
    outputs = form.empty(len(rows))
    with torch.inference_mode():
        for start in range(0, len(rows), batch_size):
            # A copy: the store keeps the rows, and the first layer may work in place.
            batch = torch.from_numpy(np.array(rows[start : start + batch_size]))
            output = module(inputs_to_device(batch, device, dtype))
            if output.shape != (len(batch), *form.shape):
                raise ModelError(
                    f"model gave the shape {tuple(output.shape)} for {len(batch)} "
                    f"rows, after {form.shape} for each of the first"
                )
            outputs[start : start + batch_size] = as_numpy(output)
    return outputs


def _output_form(packed: PackedModel, X: Any) -> _Form:
    with random_state_left_alone():
        module = packed.unpack().eval()
        output = forward(module, prepared_rows(module, X, 2))
    if not isinstance(output, Tensor) or output.shape[:1] != (2,):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output)
        raise ModelError(
            "model must give one tensor with one row per example to predict, got "
            f"{got} for two rows"
        )
    return _Form(tuple(output.shape[1:]), output.dtype)


def _as_given(X: Any, outputs: np.ndarray, form: _Form) -> Any:
    if isinstance(X, Tensor):
        return torch.from_numpy(outputs).to(form.dtype)
    return outputs


def _in_memory(
    X: np.ndarray,
    model: Any,
    form: _Form,
    batch_size: int,
    client: Client,
    workers: list[str],
) -> np.ndarray:
    bounds = cut(len(X), batch_size, PIECES_PER_REPLICA * len(workers))
    name = new_key("predict")
    futures = []
    try:
        for i, (start, stop) in enumerate(bounds):
            home = [workers[i % len(workers)]]
            # Contiguous, because Dask would otherwise pickle them.
            part = np.ascontiguousarray(X[start:stop])
            key = f"{name}-rows-{i}"
            rows = client.scatter({key: part}, workers=home)[key]
            task = (predict_rows, model, rows, form, batch_size)
            futures.append(client.submit(*task, key=f"{name}-{i}"))
            del rows, task  # the task keeps it, and drops it when it is done
        return np.concatenate(client.gather(futures))
    finally:
        release(futures)


def _lazy(X: Any, model: Any, form: _Form, batch_size: int) -> Any:
    """One delayed task per block; an empty block stays one, which concatenate drops."""
    task = delayed(predict_rows, pure=False)
    name = new_key("predict")
    parts = [
        task(model, block, form, batch_size, dask_key_name=f"{name}-{i}")
        for i, block in enumerate(X.to_delayed().reshape(-1))
    ]
    inner = (0,) * len(form.shape)
    layer: dict[Any, Any] = {
        (name, i, *inner): part.key for i, part in enumerate(parts)
    }
    return dask.array.Array(
        HighLevelGraph.from_collections(name, layer, dependencies=parts),
        name,
        chunks=(X.chunks[0], *((size,) for size in form.shape)),
        meta=form.empty(0),
    )
