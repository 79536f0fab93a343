"""From pieces to batches: cut, shuffle, move. No Dask, no threads, no state kept.

A piece is a pair of numpy arrays of equal length. Every batch has memory of its
own, at the price of one copy of its rows: the arrays of a piece stay in the
worker's store, and a model whose first layer works in place would otherwise
change what the next epoch, or the user's own array, has to say.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

Rows = tuple[np.ndarray, np.ndarray]


def batches(
    pieces: Iterable[Rows], batch_size: int, rng: np.random.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of exactly ``batch_size`` rows, cut across the pieces.

    What the last piece leaves over comes last, as a smaller batch. The next piece
    is asked for only when the batch at hand cannot be filled without it.

    Args:
        pieces: Pairs (x, y) of equal length along the first axis; read only. Empty
            pairs are passed over.
        batch_size: Rows per batch, >= 1.
        rng: Shuffles the rows within each piece; None leaves them in order.

    Yields:
        Tensors (x, y) in the pieces' dtypes, in memory of their own, on the CPU.

    Example:
        >>> pieces = [(np.arange(3), np.arange(3)), (np.arange(3, 5), np.arange(2))]
        >>> [x.tolist() for x, _ in batches(pieces, batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """
    waiting: list[Rows] = []
    missing = batch_size
    for x, y in pieces:
        order = None if rng is None else rng.permutation(len(x))
        start = 0
        while start < len(x):
            stop = min(start + missing, len(x))
            rows = slice(start, stop) if order is None else order[start:stop]
            waiting.append((x[rows], y[rows]))
            missing -= stop - start
            start = stop
            if missing == 0:
                yield _joined(waiting)
                waiting, missing = [], batch_size
    if waiting:
        yield _joined(waiting)


def to_device(
    x: Tensor, y: Tensor, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the batch on ``device`` in the dtypes that a model and a loss expect.

    Floating inputs and labels take the model's floating dtype. Integer labels become
    int64, as torch's losses want their class indices. Integer inputs, indices into
    an embedding, stay as they are, and so does bool.

    Args:
        x: Inputs of a batch.
        y: Labels of the same batch.
        device: Where the model is.
        dtype: The model's floating dtype, see :func:`floating_dtype`.

    Example:
        >>> x, y = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int8)
        >>> [t.dtype for t in to_device(x, y, "cpu", torch.float32)]
        [torch.float32, torch.int64]
    """
    if not y.is_floating_point() and y.dtype != torch.bool:
        y = y.to(device, torch.int64, non_blocking=True)
    return inputs_to_device(x, device, dtype), inputs_to_device(y, device, dtype)


def inputs_to_device(
    x: Tensor, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Return ``x`` on ``device``, in ``dtype`` if it is floating; see `to_device`."""
    wanted = dtype if x.is_floating_point() else x.dtype
    return x.to(device, wanted, non_blocking=True)


def floating_dtype(module: nn.Module) -> torch.dtype:
    """The dtype in which a model computes: that of its first floating parameter.

    A model without one is taken at its first floating buffer, then at torch's default.

    Example:
        >>> floating_dtype(nn.Linear(1, 1).double())
        torch.float64
    """
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.get_default_dtype()


def auto_device() -> torch.device:
    """CUDA if this process can use one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _joined(parts: list[Rows]) -> tuple[Tensor, Tensor]:
    return _tensor([x for x, _ in parts]), _tensor([y for _, y in parts])


def _tensor(parts: list[np.ndarray]) -> Tensor:
    """The rows in memory of their own; shuffled ones have it already."""
    whole = parts[0]
    if len(parts) > 1 or not whole.flags.owndata:
        whole = np.concatenate(parts)
    return torch.from_numpy(whole)
