"""The fit state and the history of a trainer, as JSON and tensors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl.data.models import trainable
from daskdl.data.rehearsal import MISFITS
from daskdl.errors import OptionError, SaveError
from daskdl.fitted.fitted import TrainerState, new_optimizer
from daskdl.history import LAYOUT, History, Stopping, unpack_rows
from daskdl.saving.plain import Json, Plain
from daskdl.thresholds import Sent
from daskdl.training.base import CompressionState, KeptResidual, described
from daskdl.training.epoch_control import LearningRate, Scheduling
from daskdl.training.fit_state import TrainedOptimizer

COLUMNS = {column[1] for column in LAYOUT.descr}  # kinds of columns of steps
PARTS = {"rows", "stopping", "layout"}  # of a history
STOPPING = {"Stopping": Stopping}
STEPS = "history.steps"  # name of the tensor with the packed rows of steps


def encode_moved(fitted: TrainerState, tensors: dict[str, Tensor]) -> Json:
    """Write the state of the optimizer, the scheduler and the thresholds.

    Args:
        fitted: Not changed.
        tensors: Gets those of the state.

    Raises:
        OptionError: If something of it cannot be written, or the trainer has been given
            another optimizer since.
    """
    moved, sent = fitted.fit_state.optimizer, fitted.fit_state.compression
    if moved is None:
        raise OptionError("the trainer has no optimizer_; fit it, or optimizer=False")
    _check_kept(moved.optimizer, new_optimizer(fitted.arguments, fitted.model))
    plain = Plain(tensors=tensors)
    scheduling = scheduling_of(fitted.arguments)
    position = moved.rate.position() if moved.scheduling == scheduling else None
    return {
        "optimizer": _class_of(moved.optimizer),
        "state": plain.encode(moved.optimizer.state_dict(), "optimizer"),
        "made": plain.encode(moved.made, "optimizer.made"),
        "scheduler": None if position is None else _class_of(moved.rate.scheduler),
        "position": plain.encode(position, "scheduler"),
        "sent": None if sent is None else _encoded_sent(sent),
        "residual": plain.encode(_residual_values(fitted), "residual"),
    }


def decode_moved(
    content: Json, arguments: Mapping[str, Any], model: nn.Module, given: Any
) -> tuple[TrainedOptimizer, CompressionState | None, KeptResidual | None]:
    """Make the optimizer and its scheduler, give them their state, and read the rest.

    Args:
        content: What `encode_moved` wrote, or something damaged; None: they begin anew.
        arguments: Of the trainer.
        model: With its parameters.
        given: The tensors of the state, by name.

    Raises:
        SaveError: If it is damaged.
        OptionError: If optimizer or scheduler are of another class than those saved.
    """
    optimizer, scheduling = new_optimizer(arguments, model), scheduling_of(arguments)
    moved = TrainedOptimizer.new(optimizer, scheduling, model)
    if content is None:
        return moved, None, None
    plain = Plain(tensors=dict(given))
    _check_class("optimizer", optimizer, content["optimizer"])
    try:
        optimizer.load_state_dict(plain.decode(content["state"]))
    except MISFITS as error:
        raise SaveError(f"the optimizer refuses its state: {error}") from error
    position = plain.decode(content["position"])
    if position is not None:
        _check_class("scheduler", moved.rate.scheduler, content["scheduler"])
        _go_on_(moved.rate, position)
    sent = content["sent"]
    before = plain.decode(content.get("made"))
    if before is not None:
        moved = moved._replace(made=_made_of(before, len(moved.made)))
    residual = _residual_of(plain.decode(content.get("residual")), model)
    return moved, None if sent is None else _decoded_sent(sent), residual


def scheduling_of(arguments: Mapping[str, Any]) -> Scheduling:
    """How the learning rate changes, by the arguments of a trainer."""
    every = arguments.get("scheduler_every", "epoch")
    return Scheduling(arguments.get("scheduler"), every)


def encode_history(history: History, tensors: dict[str, Tensor]) -> Json:
    """Write the rows of a history; those of single steps as a tensor of bytes."""
    packed = history.steps.packed()
    if packed:
        tensors[STEPS] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    plain = Plain(STOPPING)
    return {
        "rows": plain.encode([dict(row) for row in history], "history"),
        "stopping": plain.encode(history.stopping, "history.stopping"),
        # A later release has other columns.
        "layout": [list(column) for column in LAYOUT.descr],
    }


def decode_history(content: Json, tensors: Mapping[str, Tensor]) -> History:
    """Read a history.

    Raises:
        SaveError: If it is damaged.
    """
    if not isinstance(content, dict) or content.keys() != PARTS:
        raise SaveError(f"the history is {content!r:.80}")
    rows = Plain().decode(content["rows"])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SaveError(f"the history is {rows!r:.80}")
    history = History(rows)
    stopping = Plain(STOPPING).decode(content["stopping"])
    if stopping is not None and not isinstance(stopping, Stopping):
        raise SaveError(f"early stopping is {stopping!r:.80}")
    history.stopping = stopping
    if STEPS in tensors:
        try:
            packed = tensors[STEPS].numpy().tobytes()
            history.steps.extend(unpack_rows(packed, _layout(content["layout"])))
        except (ValueError, TypeError) as error:
            raise SaveError(f"the rows of steps are damaged: {error}") from error
    return history


def _layout(columns: Any) -> np.dtype[Any]:
    named = [(name, kind) for name, kind in columns]
    wrong = [c for c in named if not isinstance(c[0], str) or c[1] not in COLUMNS]
    if wrong:
        raise ValueError(f"columns {wrong!r:.80}")
    return np.dtype(named)


def _check_kept(had: Optimizer, makes: Optimizer) -> None:
    ours, theirs = ([len(g["params"]) for g in o.param_groups] for o in (had, makes))
    if type(had) is not type(makes) or ours != theirs:
        raise OptionError(
            f"optimizer makes a {_class_of(makes)} of {theirs} parameters, and the "
            f"state after the last fit is of a {_class_of(had)} of {ours}; save "
            "without it, optimizer=False, or fit first"
        )


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _check_class(argument: str, made: Any, saved: Json) -> None:
    if _class_of(made) != saved:
        raise OptionError(
            f"{argument} makes a {_class_of(made)}, and the saved state is of a "
            f"{saved}; to train on with another, make a new Trainer with the model_ of "
            "the one that is loaded"
        )


def _go_on_(rate: LearningRate, position: Any) -> None:
    try:
        count, own = position
        wrong = [k for k in own if callable(getattr(rate.scheduler, k, None))]
        if wrong or type(count) is not int:
            raise SaveError(f"the state of the scheduler has {count!r:.80}, {wrong}")
        rate.go_on_(count, own)
    except MISFITS as error:
        raise SaveError(f"the scheduler refuses its state: {error}") from error


def _encoded_sent(outcome: CompressionState) -> Json:
    sent = [[p, float(s.threshold), float(s.density)] for p, s in outcome.sent.items()]
    return {"sent": sent, "steps": int(outcome.steps)}


def _made_of(groups: Any, count: int) -> list[dict[str, Any]]:
    right = isinstance(groups, list) and len(groups) == count
    if not right or not all(isinstance(group, dict) for group in groups):
        raise SaveError(f"the optimizer was made with {groups!r:.80}")
    return list(groups)


def _residual_values(fitted: TrainerState) -> Any:
    residual = fitted.fit_state.residual
    if residual is None or not residual.fits(fitted.model):
        return None
    return {"counts": torch.from_numpy(residual.counts_N), "grid": residual.grid}


def _residual_of(values: Any, model: nn.Module) -> KeptResidual | None:
    if values is None:
        return None
    counts, grid = values["counts"], values["grid"]
    size = sum(p.numel() for p in trainable(model))
    if counts.dtype != torch.int32 or tuple(counts.shape) != (size,):
        raise SaveError(
            f"what was not sent is {described(counts)}, and the model has {size} "
            "trainable parameters"
        )
    if not isinstance(grid, float) or not (0 < grid < math.inf):
        raise SaveError(f"what was not sent is in steps of {grid!r:.80}")
    return KeptResidual.beside(model, counts.numpy(), grid)


def _decoded_sent(content: Mapping[str, Json]) -> CompressionState:
    sent = {}
    rows: Sequence[Any] = content["sent"]
    for pattern, threshold, density in rows:
        numbers = isinstance(threshold, float) and isinstance(density, float)
        if not (isinstance(pattern, str) and numbers and 0 < threshold < math.inf):
            raise SaveError(f"the threshold of {pattern!r:.80} is {threshold!r:.80}")
        sent[pattern] = Sent(threshold, density)
    steps = content["steps"]
    if type(steps) is not int or steps < 0:
        raise SaveError(f"the threshold is of {steps!r:.80} steps")
    return CompressionState(sent, steps)
