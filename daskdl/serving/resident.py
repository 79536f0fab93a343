"""A model in memory, and the thread that computes with it. No Dask."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from daskdl.data.batching import (
    Transform,
    Tree,
    auto_device,
    floating_dtype,
    inputs_to_device,
    rows_in,
    tensors,
)
from daskdl.serialization import Packed, PackedModel
from daskdl.serving.answers import Failure, Outputs
from daskdl.serving.waits import awaited
from daskdl.training.replica import torch_threads

T = TypeVar("T")


class Resident:
    """A model that stays in a process, in evaluation mode, and answers in order.

    Its methods are called on one event loop, and what takes time is done in a thread
    of its own. A new model is put beside the old one first: so it is known to be
    usable here before it takes over.

    Args:
        transform: What is made of each batch before, or None.
        threads: Of torch's own, >= 1.
    """

    _model: nn.Module | None
    _staged: dict[int, nn.Module]  # by version
    closed: bool

    def __init__(self, transform: Packed[Transform] | None, threads: int) -> None:
        self._transform = transform
        self._model = None
        self._staged = {}
        self.closed = False
        self._gone: Future[None] | None = None
        self._ending = contextlib.ExitStack()
        self._executor = ThreadPoolExecutor(1, "daskdl-predictor")
        # torch's setting is that of the thread which makes it, and of later ones.
        self._executor.submit(self._ending.enter_context, torch_threads(threads))

    # ---- event loop

    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        """Unpack a model, beside the one in use."""
        unpacked = await self._done(self._unpacked, model)
        if isinstance(unpacked, Failure):
            return unpacked
        if not self.closed:  # while it was unpacked
            self._staged[version] = unpacked
        return None

    def use(self, version: int) -> None:
        """Answer by a model that was staged; the former and all other ones go."""
        self._model = self._staged[version]
        self._staged.clear()

    def discard(self) -> None:
        """Models that were staged are not wanted."""
        self._staged.clear()

    async def outputs(self, x: Tree) -> Outputs | Failure:
        """What the model says to rows; they are not changed."""
        return await self._done(self._outputs, x)

    def close(self) -> None:
        """What was asked is answered, then the model and the thread go."""
        if self.closed:
            return
        self.closed = True
        self._gone = self._executor.submit(self._forget)
        self._executor.shutdown(wait=False)

    async def gone(self) -> None:
        """It was closed, and its model is in memory no longer."""
        assert self._gone is not None
        await awaited(self._gone)

    async def _done(self, function: Callable[..., T], *args: Any) -> T | Failure:
        """What a function returns, or raises, in the thread."""
        if self.closed:
            raise ConnectionError("the replica is closed")
        future = self._executor.submit(function, *args)
        await awaited(future)
        error = future.exception()
        return future.result() if error is None else Failure.of(error)

    # ---- its thread

    def _unpacked(self, model: PackedModel) -> nn.Module:
        return model.unpack().eval().to(auto_device())

    def _outputs(self, x: Tree) -> Outputs:
        model = self._model
        assert model is not None
        batch = tensors((x, None))  # copied: a first layer may work in place
        rows = rows_in(batch)
        if self._transform is not None:
            batch = self._transform.shared()(batch)
        own, _ = batch
        with torch.inference_mode():
            moved = inputs_to_device(own, auto_device(), floating_dtype(model))
            return Outputs.of(model(moved), rows)

    def _forget(self) -> None:
        self._model = None
        self._staged.clear()
        self._ending.close()
