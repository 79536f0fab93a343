"""One optimizer step of one replica: forward, backward, and what comes between them.

A step is made of a *group* of batches, whose gradients are added up. No channel, no
exchange, no epochs: those are the replica's.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl.data.batches import floating_dtype, rows_in, to_device
from daskdl.data.models import trainable
from daskdl.errors import ModelError, OptionError
from daskdl.objective import (
    Batch,
    Objective,
    batch_loss,
    is_sum,
    on_device,
    penalty_of,
)
from daskdl.training.options import check_whole
from daskdl.training.states import check_like

Group = Sequence[Batch]


@dataclass(frozen=True)
class Stepping:
    """How an optimizer step is made; the options of the same names of a trainer.

    Args:
        autocast: Computes forward passes in this dtype; None: in the model's own.
        accumulate: Batches of a group, at most.
        clip_grad_norm: Largest norm of all gradients together; None: any.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> Stepping(torch.float64)
        Traceback (most recent call last):
        daskdl.errors.OptionError: autocast must be torch.bfloat16, torch.float16 or \
None, got torch.float64
    """

    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None

    def __post_init__(self) -> None:
        # By identity: a numpy dtype, for one, is not comparable with torch's.
        if not any(self.autocast is d for d in (None, torch.bfloat16, torch.float16)):
            raise OptionError(
                "autocast must be torch.bfloat16, torch.float16 or None, got "
                f"{self.autocast!r}"
            )
        check_whole("accumulate", self.accumulate, 1)
        norm: Any = self.clip_grad_norm
        number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if norm is not None and not (number and 0 < norm < math.inf):
            raise OptionError(
                f"clip_grad_norm must be a number > 0 or None, got {norm!r}"
            )

    def check_model(self, module: nn.Module) -> None:
        """Refuse a model with which these options do not go.

        Raises:
            OptionError: If gradients were to be scaled that are in half precision.
        """
        half = [n for n, p in module.named_parameters() if p.dtype == torch.float16]
        if self.autocast is torch.float16 and half:
            raise OptionError(
                "autocast=torch.float16 needs a model with float32 parameters, got "
                f"{half[0]!r} in torch.float16; use model.float(), or no autocast"
            )


class Stepper:
    """Makes the optimizer steps of a model.

    Args:
        module: The model, on its device.
        objective: What to make small; moved to the device.
        optimizer: Of the model's trainable parameters.
        stepping: How.
        device: Where to compute.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        stepping: Stepping,
        device: torch.device,
    ) -> None:
        self._module = module
        self._objective = on_device(objective, device)
        self._optimizer = optimizer
        self._stepping = stepping
        self._device = device
        self._dtype = floating_dtype(module)
        self._parameters = trainable(module)
        # Gradients in float16 are too small without; this finds the factor by itself.
        scaling = stepping.autocast is torch.float16
        self._scaler = torch.amp.GradScaler(device.type) if scaling else None

    def backward(self, group: Group) -> float:
        """Compute the gradients of a group of batches; the parameters stay.

        Every batch weighs as many as it has rows, so that a mean loss has the
        gradients of one large batch.

        Args:
            group: On any device; one batch after the other is moved.

        Returns:
            The loss over all rows of the group.
        """
        self._optimizer.zero_grad(set_to_none=True)
        rows = rows_of(group)
        parts = [self._backward(batch, rows) for batch in group]
        # Only now: reading one waits for an accelerator.
        return sum(float(part) for part in parts)

    def _backward(self, batch: Batch, rows: int) -> Tensor:
        batch = to_device(*batch, self._device, self._dtype)
        with self._autocast(), _one_row_named(batch):
            loss = batch_loss(self._objective, self._module, batch)
            if rows_in(batch) != rows and not is_sum(self._objective):
                # Not times a share: of equal batches this is the plain loss / k.
                loss = loss / (rows / rows_in(batch))
            penalty = penalty_of(self._objective, self._module)
            if penalty is not None:
                loss = loss + penalty * (rows_in(batch) / rows)
        scaled_loss = loss if self._scaler is None else self._scaler.scale(loss)
        scaled_loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._stepping.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._stepping.autocast)

    def values(self) -> dict[str, Any]:
        """The state of the factor on float16 gradients; empty where there is none."""
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    def restore_(self, values: Mapping[str, Any]) -> None:
        """Go on from what `values` made."""
        if self._scaler is not None and values:
            check_like(self.values(), values, "it")
            self._scaler.load_state_dict(dict(values))

    def gradient_norm(self) -> float:
        """Return the norm of all gradients together, before they are clipped."""
        squares = sum(
            float(grad.double().square().sum()) for grad in _gradients(self._parameters)
        )
        factor = 1.0 if self._scaler is None else self._scaler.get_scale()
        return math.sqrt(squares) / factor

    def _clip(self, norm: float) -> None:
        holders = []
        for gradient in _gradients(self._parameters):
            # torch clips what is the gradient of something, and nothing that is sparse:
            # here of one number, as large as the gradient says it is.
            holders.append(gradient.new_empty(()).expand(gradient.shape))
            holders[-1].grad = gradient
        nn.utils.clip_grad_norm_(holders, norm)

    def update(self, scale: float) -> None:
        """Move the parameters by the gradients that are there.

        In float16, gradients that overflowed move nothing: the factor on them is
        lowered for the next step.

        Args:
            scale: Factor on the learning rate.

        Raises:
            ModelError: If there is no learning rate to scale.
        """
        if self._stepping.clip_grad_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            self._clip(self._stepping.clip_grad_norm)
        with scaled(self._optimizer, scale):
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()


@contextlib.contextmanager
def _one_row_named(batch: Batch) -> Iterator[None]:
    """Say what to do where batch norm refuses a batch of one row."""
    try:
        yield
    except ValueError as error:
        is_batch_norm = str(error).startswith("Expected more than 1 value per channel")
        if rows_in(batch) != 1 or not is_batch_norm:
            raise
        raise ModelError(
            f"batch norm cannot train on a batch of one row: {error}; the last batch of"
            " a replica's epoch has the rows that are left over: leave those out with "
            "fit(drop_last=True), or take a batch_size > 1 that leaves none"
        ) from error


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """All gradients, of sparse ones the values, which may be changed in place."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            # An index may occur several times: its values are one gradient.
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        else:
            gradients.append(parameter.grad)
    return gradients


def rows_of(group: Group) -> int:
    """How many rows a group of batches has.

    Example:
        >>> rows_of([(torch.zeros(4, 2), torch.zeros(4)), (torch.zeros(3, 2),) * 2])
        7
    """
    return sum(rows_in(batch) for batch in group)


@contextlib.contextmanager
def scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rate of every parameter group meanwhile.

    Raises:
        ModelError: If a group has no learning rate to scale.
    """
    if factor == 1.0:
        yield
        return
    groups = optimizer.param_groups
    missing = [i for i, group in enumerate(groups) if "lr" not in group]
    if missing:
        raise ModelError(
            f"parameter groups {missing} of the optimizer have no 'lr' to scale by "
            f"{factor:g}; use GradientSharing(update_scale='sum')"
        )
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
