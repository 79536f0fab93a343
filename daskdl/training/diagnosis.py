"""Why training may have diverged: from numbers to words. Nothing is measured here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from daskdl.training.exchange import Excess

# Below these the numbers are as they are in training that goes well.
APART = 2.0  # steps between replicas
BEHIND = 10.0  # thresholds; ResidualClipping's default lets 5 be carried over
# No density would follow: it is the steps that are too long, and that is said already.
TOO_FAR = 1e6  # thresholds


@dataclass(frozen=True)
class Symptoms:
    """What is known of a replica when its loss is not what it should be.

    Attributes:
        replica: Its number.
        epoch: Counted from 0.
        step: Of this replica, from 1, the one that was not made any more.
        loss: Of that step.
        first: Loss of the first step; None: it is this one.
        before: Loss of the step before; None: it was the first.
        high_steps: For so many it was too high; 0 if it is not a number.
        learning_rate: Of the optimizer's first group; NaN if it has none.
        scale: How much an update of each replica counts.
        replicas: That train.
        staleness: Steps ahead of the slowest replica, mean of this epoch.
        residual: In multiples of the threshold, that 1 % of the parameters reach; NaN
            if not known.
        gradient_norm: Of this step, before clipping; NaN if not known.
        clip_grad_norm: What it is clipped to; None: it is not.
        excess: What was too much for the exchange after the step, which was made;
            None: it is the loss.
    """

    replica: int
    epoch: int
    step: int
    loss: float
    first: float | None = None
    before: float | None = None
    high_steps: int = 0
    learning_rate: float = math.nan
    scale: float = 1.0
    replicas: int = 1
    staleness: float = 0.0
    residual: float = math.nan
    gradient_norm: float = math.nan
    clip_grad_norm: float | None = None
    excess: Excess | None = None

    @property
    def rising(self) -> bool:
        """Whether the loss had risen before, and did not jump in one step."""
        if self.first is None or self.before is None:
            return False
        return self.before - self.first > max(1.0, abs(self.first))


def diagnosis(symptoms: Symptoms) -> str:
    """Say what happened, where the last good state is, and what the numbers hint at.

    Example:
        >>> print(diagnosis(Symptoms(replica=1, epoch=0, step=1, loss=math.nan)))
        the loss became nan at step 1 of replica 1, in epoch 0; the last agreed state \
is that of the start, and in model_; nothing had been trained yet: look for NaN and \
infinity in X and y, and at the loss
    """
    epoch = symptoms.epoch
    good = f"epoch {epoch - 1}" if epoch else "the start"
    agreed = f"the last agreed state is that of {good}, and in model_"
    return "; ".join([_course(symptoms), agreed, *_hints(symptoms)])


def _course(s: Symptoms) -> str:
    where = f"at step {s.step} of replica {s.replica}, in epoch {s.epoch}"
    before = "" if s.first is None else f"; it was {s.first:.4g} at its first step"
    if s.excess is not None:
        return _excess(s.excess, where)
    if s.high_steps:
        return (
            f"the loss ran away: it is {s.loss:.4g} {where}, and has been too high for "
            f"{s.high_steps} steps{before}"
        )
    if s.before is not None:
        before += f" and {s.before:.4g} just before"
    return f"the loss became {s.loss} {where}{before}"


def _excess(excess: Excess, where: str) -> str:
    far, quantum = excess
    if math.isnan(quantum) or not math.isfinite(far):
        return f"parameters became {far} {where}"
    return (
        f"parameters moved farther than updates can say {where}: by {far:.4g}, which "
        f"is more than 2**31 - 1 of the largest quanta, {quantum:g}"
    )


def _hints(s: Symptoms) -> Iterator[str]:
    if s.first is None:
        yield (
            "nothing had been trained yet: look for NaN and infinity in X and y, and "
            "at the loss"
        )
    elif s.high_steps or s.rising or s.excess is not None:
        yield from _of_rate(s)
        yield from _of_gradient(s)
        yield from _of_sharing(s)
    else:
        yield (
            "it came from one step to the next: look for NaN in X, and for a division "
            "by 0 or the logarithm of 0 in the loss; if there is none, lower the "
            f"learning rate{_rate(s)}"
        )
    if s.high_steps:
        yield "if such a loss is as it should be, set max_loss_rise=None"


def _rate(s: Symptoms) -> str:
    return "" if math.isnan(s.learning_rate) else f", {s.learning_rate:g}"


def _of_rate(s: Symptoms) -> Iterator[str]:
    yield f"lower the learning rate{_rate(s)}"
    group = s.scale * s.replicas
    if s.replicas > 1 and group > 1.01:  # not by rounding alone
        yield (
            f"with this update_scale {s.replicas} replicas move {group:g} times as far "
            "as one alone at this rate: lower it, or use 'mean'"
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
            f"this replica is {s.staleness:.1f} steps ahead of the slowest in the "
            "mean: lower max_staleness, or the optimizer's momentum"
        )
    if BEHIND <= s.residual < TOO_FAR:
        far = s.residual
        shown = f"{far:.0f}" if far < 1000 else f"10^{math.floor(math.log10(far))}"
        yield (
            f"1 % of the parameters are {shown} thresholds or more from what "
            "the others know: the compression does not follow, allow a higher density"
        )
