"""One optimizer step: gradients of a batch group, autocast, clipping, loss scaling.

Also detects diverging losses, and explains divergence to the user.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl.config import check_whole, is_number
from daskdl.data.batching import (
    floating_dtype,
    inputs_to_device,
    leaves,
    length,
    to_device,
)
from daskdl.data.checks import trainable
from daskdl.errors import ModelError, OptionError, SaveError
from daskdl.evaluation.evaluate import (
    LogSums,
    batch_mean,
    loss_weight,
    mean_weights,
    share_of_mean,
)
from daskdl.objective import (
    Batch,
    Objective,
    OwnStep,
    Penalized,
    call,
    loss_and_logs,
    on_device,
    scored,
)
from daskdl.training.state import check_like


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with all tensors dense.

    Example:
        >>> layer = torch.nn.Embedding(3, 2, sparse=True)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.tensor([1])).sum().backward()
        >>> optimizer.step()
        >>> state_of(optimizer)["state"][0]["momentum_buffer"]
        tensor([[0., 0.],
                [1., 1.],
                [0., 0.]])
    """
    state = optimizer.state_dict()
    dense = {
        number: {
            name: value.to_dense() if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
        }
        for number, entries in state["state"].items()
    }
    return {**state, "state": dense}


def restore_optimizer_(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a checkpoint's state dict and check it, which torch does only in a step.

    Raises:
        SaveError: If an option of a group is missing or has another type. For most of
            torch's own optimizers, also if a state tensor's shape differs from its
            parameter's, or a parameter lacks an entry that others of its group have.
    """
    groups, kind = optimizer.param_groups, type(optimizer)
    # Others of torch's optimizers have tensors of other shapes than the parameters.
    is_torch = kind.__module__.startswith("torch.optim")
    alike = is_torch and kind.__name__ not in ("LBFGS", "Adafactor")
    expected = [{name: group[name] for name in optimizer.defaults} for group in groups]
    optimizer.load_state_dict(dict(state))
    for number, group in enumerate(optimizer.param_groups):
        for name, option in expected[number].items():
            _check_option(option, group.get(name), f"param_groups[{number}].{name}")
        if alike:
            _check_tensors(optimizer, group, f"state of group {number}")


def _check_option(expected: Any, value: Any, what: str) -> None:
    """Check an option; torch accepts a tensor as a number, and None as a default."""
    if expected is not None and not isinstance(expected, bool | torch.Tensor):
        if not isinstance(value, torch.Tensor):
            check_like(expected, value, what)
    elif isinstance(value, str | Mapping | Sequence):
        raise SaveError(f"{what} is damaged: it is a {type(value).__name__}")


def _check_tensors(optimizer: Optimizer, group: Mapping[str, Any], what: str) -> None:
    states = [(p, optimizer.state[p]) for p in group["params"] if p in optimizer.state]
    named = {name for _, state in states for name in state}
    for number, (parameter, state) in enumerate(states):
        for name in named:
            where, value = f"{what}[{number}].{name}", state.get(name)
            if name not in state:
                raise SaveError(f"{where} is missing")
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                check_like(parameter, value, where)
            elif not isinstance(value, torch.Tensor | int | float | None):
                raise SaveError(f"{where} is damaged: it is a {type(value).__name__}")


# Steps between decisions. Shorter blocks would have too few low losses if losses are
# noisy, as with a batch of one row.
BLOCK = 50
BLOCKS = 4  # consecutive blocks that must be too high
LOW = 5  # lowest losses of a block that are ignored: a tenth
# Minimum ratio of the lowest remaining loss to the median. Below this ratio, losses are
# noisy, and the first loss was a low one by chance.
SPREAD = 0.25


class Level(NamedTuple):
    """Summary of one block: rises of its losses above the first loss of training."""

    low: float  # lowest rise after the `LOW` lowest
    median: float


class LossWatch:
    """Detects from the losses of one replica that training has diverged.

    Training has diverged if, in four consecutive blocks of 50 steps,

    - nine of ten losses were more than ``max_rise * max(1, |first|)`` above the first,
    - these nine were close together: the rise of the lowest above the first loss was at
      least a quarter of the median rise, and
    - losses did not fall: the median of the fourth block is not below that of the first
      block.

    Noisy, small and negative losses, spikes, bad starts that recover, and losses that
    return to their first value do not count as divergence.

    Example:
        >>> watch = LossWatch(max_rise=10)
        >>> [step for step in range(1, 501) if watch.note(2.0 if step < 101 else 50.0)]
        [300, 350, 400, 450, 500]
    """

    first_loss: float | None
    last: float | None

    def __init__(self, max_rise: float | None) -> None:
        self.first_loss = self.last = None
        self._max_rise = max_rise
        self._block: list[float] = []
        self._levels: list[Level] = []

    def note(self, loss: float) -> bool:
        """Add a step's finite loss; return whether training has diverged."""
        if self.first_loss is None:
            self.first_loss = loss
        self.last = loss
        if self._max_rise is None:
            return False
        self._block.append(loss - self.first_loss)
        if len(self._block) < BLOCK:
            return False
        level = Level(sorted(self._block)[LOW], median(self._block))
        self._levels = [*self._levels, level][-BLOCKS:]
        self._block = []
        least = self._max_rise * max(1.0, abs(self.first_loss))
        return (
            len(self._levels) == BLOCKS
            and all(level.low > least for level in self._levels)
            and all(level.low >= SPREAD * level.median for level in self._levels)
            and self._levels[-1].median >= self._levels[0].median
        )

    def values(self) -> dict[str, Any]:
        """Return the state as plain values."""
        levels = [tuple(level) for level in self._levels]
        seen = {"first": self.first_loss, "last": self.last}
        return {**seen, "block": list(self._block), "levels": levels}

    def restore_(self, values: Mapping[str, Any]) -> None:
        """Restore the result of `values`."""
        first_loss, last = values["first"], values["last"]
        self.first_loss = None if first_loss is None else float(first_loss)
        self.last = None if last is None else float(last)
        self._block = [float(rise) for rise in values["block"]]
        self._levels = [Level(*map(float, level)) for level in values["levels"]]

    @property
    def recent(self) -> int:
        """Number of steps on which the last decision is based."""
        return BLOCK * len(self._levels)


# Healthy training stays below these limits.
APART = 2.0  # steps ahead of the slowest replica
BEHIND = 10.0  # thresholds; ResidualClipping's default carries over up to 5
# Above this limit no density suffices: the steps are too long, covered by other hints.
TOO_FAR = 1e6  # thresholds


@dataclass(frozen=True)
class Symptoms:
    """Measurements of a replica that has diverged.

    Attributes:
        replica: Number of the replica.
        epoch: Counted from 0.
        step: Step of this replica, counted from 1.
        loss: Loss of this step.
        first_loss: First finite loss; None: there is none.
        before: Last finite loss, which may be that of this step; None: there is none.
        high_steps: Steps for which the loss was too high; 0 if the loss is not finite.
        learning_rate: Rate of the optimizer's first group; NaN if it has none.
        scale: Weight of each replica's updates.
        adds_up: Whether it is 1 because of `GradientSharing.adapt_rate`.
        momentum: Part of its updates that the replica sends again.
        replicas: Number of replicas that train.
        staleness: Steps ahead of the slowest replica, mean over this epoch.
        residual: 99th percentile of |residual| / threshold; NaN if unknown.
        gradient_norm: Norm of the last gradients, after clipping if there is an
            `event`; NaN if unknown.
        clip_grad_norm: Norm that gradients are clipped to; None: no clipping.
        event: Error of the exchange after the step; "": the loss is the problem, and
            the step was not made.
        only_loss_is_nan: Whether the loss is NaN for finite outputs of the model.
    """

    replica: int
    epoch: int
    step: int
    loss: float
    first_loss: float | None = None
    before: float | None = None
    high_steps: int = 0
    learning_rate: float = math.nan
    scale: float = 1.0
    adds_up: bool = False
    momentum: float = 0.0
    replicas: int = 1
    staleness: float = 0.0
    residual: float = math.nan
    gradient_norm: float = math.nan
    clip_grad_norm: float | None = None
    event: str = ""
    only_loss_is_nan: bool = False

    @property
    def rising(self) -> bool:
        """Whether the loss rose over several steps instead of jumping in one."""
        if self.first_loss is None or self.before is None:
            return False
        return self.before - self.first_loss > max(1.0, abs(self.first_loss))


def diagnosis(symptoms: Symptoms) -> str:
    """Explain the divergence: its course, the last good state, and possible remedies.

    Example:
        >>> print(diagnosis(Symptoms(replica=1, epoch=0, step=1, loss=math.nan)))
        the loss became nan at step 1 of replica 1, in epoch 0; model_ holds the \
initial state; no step had succeeded: check X and y for NaN and infinity, and check \
the loss function
    """
    epoch = symptoms.epoch
    agreed = f"state agreed on after epoch {epoch - 1}" if epoch else "initial state"
    holds = f"model_ holds the {agreed}"
    return "; ".join([_course(symptoms), holds, *_hints(symptoms)])


def _course(s: Symptoms) -> str:
    where = f"at step {s.step} of replica {s.replica}, in epoch {s.epoch}"
    before = (
        "" if s.first_loss is None else f"; it was {s.first_loss:.4g} at its first step"
    )
    if s.event:
        return f"{s.event} {where}"
    if s.high_steps:
        return (
            f"the loss diverged: it is {s.loss:.4g} {where}, and has been too high for "
            f"{s.high_steps} steps{before}"
        )
    if s.before is not None:
        before += f" and {s.before:.4g} just before"
    return f"the loss became {s.loss} {where}{before}"


def _hints(s: Symptoms) -> Iterator[str]:
    if s.only_loss_is_nan:
        yield (
            "the model's outputs are finite, so the loss itself is nan: perhaps no "
            "label of this batch counts, and the loss divides 0 by 0; in your own "
            "loss, divide by count.clamp(min=1); a torch loss gives such a batch the "
            "weight 0: loss=torch.nn.CrossEntropyLoss(ignore_index=-1), or "
            "loss=functools.partial(torch.nn.functional.cross_entropy, ignore_index=-1)"
        )
    elif s.first_loss is None:
        yield (
            "no step had succeeded: check X and y for NaN and infinity, and check the "
            "loss function"
        )
    elif s.high_steps or s.rising or s.event:
        yield from _of_rate(s)
        yield from _of_gradient(s)
        yield from _of_sharing(s)
    else:
        yield (
            "the loss jumped within one step: check X for NaN, and the loss for a "
            "division by 0 or a logarithm of 0; if there is neither, lower the "
            f"learning rate{_rate(s)}"
        )
    if s.high_steps:
        yield "if such a loss is expected, set max_loss_rise=None"


def _rate(s: Symptoms) -> str:
    return "" if math.isnan(s.learning_rate) else f", {s.learning_rate:g}"


def _of_rate(s: Symptoms) -> Iterator[str]:
    yield f"lower the learning rate{_rate(s)}"
    group = s.scale * s.replicas
    if s.adds_up and s.replicas > 1:
        yield (
            f"the updates of {s.replicas} replicas add up, as most parameters are rows "
            "of sparse embeddings, which they may have in common: use adapt_rate=False"
        )
    elif s.replicas > 1 and group > 1.01:  # not by rounding alone
        yield (
            f"with this update_scale {s.replicas} replicas move {group:g} times as far "
            "as one alone at this rate: lower it, or use 'mean'"
        )
    if s.momentum and s.replicas > 1:
        yield (
            f"with GradientSharing(momentum={s.momentum:g}) replicas move up to "
            f"{1 / (1 - s.momentum):.3g} times as far as without: lower it"
        )


def _of_gradient(s: Symptoms) -> Iterator[str]:
    norm = s.gradient_norm
    if s.clip_grad_norm is None:
        yield "set clip_grad_norm" + (
            f", the norm is {norm:.4g}" if math.isfinite(norm) else ""
        )
    elif norm > s.clip_grad_norm:
        yield (
            f"gradients are clipped already, this one from {norm:.4g} to "
            f"clip_grad_norm={s.clip_grad_norm:g}"
        )


def _of_sharing(s: Symptoms) -> Iterator[str]:
    if s.staleness >= APART:
        yield (
            f"on average, this replica is {s.staleness:.1f} steps ahead of the "
            "slowest: lower max_staleness, or the optimizer's momentum"
        )
    if BEHIND <= s.residual < TOO_FAR:
        far = s.residual
        shown = f"{far:.0f}" if far < 1000 else f"10^{math.floor(math.log10(far))}"
        yield (
            f"1 % of the residuals are {shown} thresholds or more: the compression "
            "does not keep up, allow a higher density"
        )


BatchGroup = Sequence[Batch]
ONE_ROW = "Expected more than 1 value per channel"  # start of torch's batch norm error


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that normalize with the statistics of each batch."""
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
    ]


@contextlib.contextmanager
def running_statistics(module: nn.Module) -> Iterator[None]:
    """Context manager: batch norm uses its running statistics and does not change them.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with running_statistics(norm):
        ...     print(norm(torch.tensor([[0.5, 2.0]])).round(decimals=3).tolist())
        [[0.5, 2.0]]
    """
    norms = batch_norms(module)
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


@dataclass(frozen=True)
class Stepping:
    """Options of an optimizer step, named as in a trainer.

    Args:
        autocast: Dtype of forward passes; None: the model's own.
        accumulate: Most batches of a group.
        clip_grad_norm: Largest norm of all gradients together; None: any.

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
        # By identity: a numpy dtype, for example, cannot be compared with torch's.
        if not any(self.autocast is d for d in (None, torch.bfloat16, torch.float16)):
            raise OptionError(
                "autocast must be torch.bfloat16, torch.float16 or None, got "
                f"{self.autocast!r}"
            )
        check_whole("accumulate", self.accumulate, 1)
        norm = self.clip_grad_norm
        if norm is not None and not (is_number(norm) and 0 < norm < math.inf):
            raise OptionError(
                f"clip_grad_norm must be a number > 0 or None, got {norm!r}"
            )

    def check_model(self, module: nn.Module) -> None:
        """Check that these options fit the model."""
        half = [n for n, p in module.named_parameters() if p.dtype == torch.float16]
        if self.autocast is torch.float16 and half:
            raise OptionError(
                "autocast=torch.float16 needs a model with float32 parameters, got "
                f"{half[0]!r} in torch.float16; use model.float(), or no autocast"
            )


class GroupLoss(NamedTuple):
    """Loss of one optimizer step."""

    loss: float  # 0 if no label counts
    weight: float  # in the mean over steps, see `loss_weight`; 0 if no label counts


class Stepper:
    """Makes the optimizer steps of a model.

    Batch norm cannot train on a batch of one row. With a larger `batch_size`, such a
    batch is a remainder, for which batch norm uses its running statistics.

    Attributes:
        logs: Sums of what the user's own step logs.
    """

    logs: LogSums

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        stepping: Stepping,
        device: torch.device,
        batch_size: int = 1,
    ) -> None:
        self.logs = LogSums()
        self._batch_size = batch_size
        self._module = module
        # Labels are counted before they are moved.
        counts = isinstance(objective, nn.Module) and device.type != "cpu"
        self._counting = copy.deepcopy(objective) if counts else objective
        self._objective = on_device(objective, device)
        self._optimizer = optimizer
        self._stepping = stepping
        self._device = device
        self._dtype = floating_dtype(module)
        self._parameters = trainable(module)
        # The loss of a user's own step includes any penalty.
        self._penalty = (
            module.penalty
            if isinstance(module, Penalized) and not isinstance(objective, OwnStep)
            else None
        )
        self._autocast: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext()
            if stepping.autocast is None
            else torch.autocast(device.type, stepping.autocast)
        )
        # Gradients in float16 would underflow; the scaler adapts its loss scale.
        scaling = stepping.autocast is torch.float16
        self._scaler = torch.amp.GradScaler(device.type) if scaling else None

    def backward(self, group: BatchGroup) -> GroupLoss:
        """Compute the gradients of a group of batches; parameters are unchanged.

        Each batch is weighted by its labels that count, see `batch_mean`, so that a
        mean loss has the gradients of one large batch.
        """
        self._optimizer.zero_grad(set_to_none=True)
        rows = [length(x) for x, _ in group]
        weights = [
            mean_weights(self._counting, y, count)
            for (_, y), count in zip(group, rows, strict=True)
        ]
        totals = [sum(terms) for terms in zip(*weights, strict=True)]
        group_rows = sum(rows)
        parts = []
        for batch, terms, count in zip(group, weights, rows, strict=True):
            with self._normalizing(count):
                parts.append(self._backward(batch, count, terms, totals, group_rows))
        # Read only at the end: reading waits for the accelerator.
        loss = sum(float(part) for part in parts)
        return GroupLoss(loss, loss_weight(totals, group_rows))

    def _normalizing(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """Return the context for forward and backward passes of a batch."""
        if rows == 1 < self._batch_size:
            return running_statistics(self._module)
        return contextlib.nullcontext()

    def _backward(
        self,
        batch: Batch,
        rows: int,
        weights: Sequence[float],
        totals: Sequence[float],
        group_rows: int,
    ) -> Tensor:
        """Compute the gradients of a batch of `rows` of the `group_rows` of its group.

        The weights and totals are those of `batch_mean`.
        """
        objective = self._objective
        x, y = to_device(*batch, self._device, self._dtype)
        loss: Tensor
        with self._autocast:
            try:
                if isinstance(objective, OwnStep):
                    loss, logs = loss_and_logs(objective.function(self._module, (x, y)))
                    if logs:
                        self.logs.add(logs, rows)
                    loss = share_of_mean(loss, weights[0], totals[0])
                else:
                    # No name for the output, which may be large: it is freed before
                    # the backward pass, unless the loss needs it there.
                    loss = batch_mean(
                        objective,
                        scored(call(self._module, x)),
                        y,
                        weights,
                        totals,
                    )
            except ValueError as error:
                if rows == 1 and str(error).startswith(ONE_ROW):
                    raise ModelError(
                        f"batch norm cannot train on a batch of one row: {error}; use "
                        "a batch_size > 1; if it has no running statistics, also use "
                        "fit(drop_last=True), which leaves out incomplete batches"
                    ) from error
                raise
            penalty = None if self._penalty is None else self._penalty()
            if penalty is not None:
                loss = loss + penalty * (rows / group_rows)
        if not loss.requires_grad:
            raise ModelError(
                "the loss has no gradient: compute it from the model's output by "
                "operations that torch can differentiate, without argmax, round, "
                "detach, item or numpy"
            )
        scaled_loss = loss if self._scaler is None else self._scaler.scale(loss)
        scaled_loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def has_finite_outputs(self, group: BatchGroup) -> bool:
        """Whether all outputs for a group are finite; called when its loss is NaN.

        The outputs of a user's own step are unknown. They count as finite if all
        gradients are 0.
        """
        if isinstance(self._objective, OwnStep):
            return self.gradient_norm() == 0
        outputs = []
        for x, _ in group:
            inputs = inputs_to_device(x, self._device, self._dtype)
            with torch.no_grad(), self._autocast, self._normalizing(length(x)):
                outputs.append(scored(call(self._module, inputs)))
        return all(
            bool(leaf.isfinite().all())
            for output in outputs
            for leaf in leaves(output)
            if isinstance(leaf, Tensor)
        )

    def values(self) -> dict[str, Any]:
        """Return the state of the float16 loss scaler; empty without one."""
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    def restore_(self, values: Mapping[str, Any]) -> None:
        """Restore the result of `values`."""
        if self._scaler is not None and values:
            check_like(self.values(), values, "it")
            self._scaler.load_state_dict(dict(values))

    def gradient_norm(self) -> float:
        """Return the norm of all gradients together, before `update` clips them."""
        squares = sum(
            float(grad.double().square().sum()) for grad in _gradients(self._parameters)
        )
        factor = 1.0 if self._scaler is None else self._scaler.get_scale()
        return math.sqrt(squares) / factor

    def _clip(self, norm: float) -> None:
        holders = []
        for gradient in _gradients(self._parameters):
            # torch clips only dense gradients of tensors. This holder has one element,
            # expanded to the shape of the gradient.
            holders.append(gradient.new_empty(()).expand(gradient.shape))
            holders[-1].grad = gradient
        nn.utils.clip_grad_norm_(holders, norm)

    def update(self, scale: float, rate_factor: float = 1.0) -> None:
        """Make an optimizer step with the gradients of `backward`.

        With float16, a step whose gradients overflow is skipped, and the loss scale
        decreases.

        Args:
            scale: See `scaled`.
            rate_factor: See `scaled`.
        """
        if self._stepping.clip_grad_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            self._clip(self._stepping.clip_grad_norm)
        with scaled(self._optimizer, scale, rate_factor):
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return all gradients; of sparse ones their values. Views, changeable in place."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            # An index may occur several times; its values are summed.
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        else:
            gradients.append(parameter.grad)
    return gradients


@contextlib.contextmanager
def scaled(
    optimizer: Optimizer, factor: float, rate_factor: float = 1.0
) -> Iterator[None]:
    """Context manager: multiply the learning rate of every parameter group.

    Args:
        optimizer: Optimizer whose groups are changed.
        factor: On the learning rate.
        rate_factor: On the learning rate too, but not on the decoupled weight decay of
            torch's own optimizers.
    """
    factor *= rate_factor
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
    before = [(group["lr"], group.get("weight_decay")) for group in groups]
    decouples = isinstance(optimizer, torch.optim.Adafactor)  # without an option
    for group in groups:
        group["lr"] = group["lr"] * factor
        if decouples or group.get("decoupled_weight_decay"):
            group["weight_decay"] = group["weight_decay"] / rate_factor
    try:
        yield
    finally:
        for group, (rate, decay) in zip(groups, before, strict=True):
            group["lr"] = rate
            if decay is not None:
                group["weight_decay"] = decay


# Optimizers that divide by the root of squared gradients have one of these options.
ADAPTIVE_OPTIONS = ("betas", "beta2_decay", "centered", "rho", "lr_decay")


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether an optimizer divides by the root of squared gradients, as Adam.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(1))]
        >>> adam, sgd = torch.optim.Adam(weights), torch.optim.SGD(weights)
        >>> is_adaptive(adam), is_adaptive(sgd)
        (True, False)
    """
    return any(
        key in group for group in optimizer.param_groups for key in ADAPTIVE_OPTIONS
    )


def has_sparse_gradients(module: nn.Module) -> bool:
    """Whether more than half of the parameters get sparse gradients.

    Example:
        >>> rows = nn.Embedding(100, 4, sparse=True)
        >>> has_sparse_gradients(rows), has_sparse_gradients(nn.Embedding(100, 4))
        (True, False)
    """
    sparse = {
        part.weight
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    size = sum(weight.numel() for weight in sparse if weight.requires_grad)
    return 2 * size > sum(parameter.numel() for parameter in trainable(module))
