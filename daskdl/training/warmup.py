"""What a newcomer does before it joins, so that nobody waits for its first step.

A first step imports, compiles and connects for seconds; the others, who may be only
`max_staleness` steps ahead of it, would stand still meanwhile.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn

from daskdl.buffers import load_buffers_, pack_buffers
from daskdl.data.batches import floating_dtype, to_device
from daskdl.data.loading import connect
from daskdl.data.rehearsal import random_state_left_alone
from daskdl.training.base import TrainingMaster
from daskdl.training.task import Recipe

logger = logging.getLogger(__name__)


def warm_up(recipe: Recipe, master: TrainingMaster, device: torch.device) -> None:
    """Do once what the first step does, and undo what it changed.

    Args:
        recipe: The model is on its device; its parameters and buffers stay as they
            are. A callable with a state of its own is called once more.
        master: Warms up what it does between steps.
        device: Where the replica computes.
    """
    dtype = floating_dtype(recipe.model)
    with random_state_left_alone():
        _try("loading", connect)
        _try("the model", lambda: _model(recipe, device))
        _try("the optimizer", lambda: _optimizer(recipe, device, dtype))
        _try("the exchange", lambda: master.warm_up(device, dtype))


def _try(what: str, do: Callable[[], None]) -> None:
    try:
        do()
    except Exception as error:  # user code; in a real step it is reported
        logger.info("warming up %s: %s", what, error)


def _model(recipe: Recipe, device: torch.device) -> None:
    module = recipe.model
    buffers = pack_buffers(module)
    x, y = (torch.from_numpy(rows) for rows in recipe.rows)
    try:
        x, y = to_device(x, y, device, floating_dtype(module))
        loss = recipe.loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        module.zero_grad(set_to_none=True)
        load_buffers_(module, buffers)


def _optimizer(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> None:
    small = nn.Linear(2, 2, device=device, dtype=dtype)
    optimizer = recipe.optimizer(list(small.parameters()))
    small(torch.ones(2, 2, device=device, dtype=dtype)).sum().backward()
    optimizer.step()
