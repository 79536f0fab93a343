"""From the replicas' results to one; runs on a worker, not on the client."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from daskdl.packed import Packed
from daskdl.thresholds import average_sent
from daskdl.training.optimizer_state import OptimizerState, add
from daskdl.training.outcome import Outcome
from daskdl.training.parameters import Parameters
from daskdl.training.task import Result

INT32 = np.iinfo(np.int32)


@dataclass
class Final:
    """What a fit ends with.

    Attributes:
        parameters: On which all agree, with the residuals of all together.
        optimizer: Averaged state; None if the run did not come to its end.
        outcome: What is left to the next fit; None if no replica left anything.
        schedule: Where it stands; empty if there is none, or no optimizer.
        steps: Rows of steps that were not reported before, packed.
        restored: Whether the parameters are those of the best epoch.
        met: Whether they are of any epoch; else they are those of the start.
    """

    parameters: Parameters
    optimizer: OptimizerState | None
    outcome: Outcome | None
    schedule: bytes = b""
    steps: bytes = b""
    restored: bool = False
    met: bool = True


def merge(results: Sequence[Result]) -> Packed[Final]:
    """Join what the replicas left behind.

    The parameters are those on which all agreed last, which is what was validated. All
    that came to the end contribute what they had not sent yet: whole steps of the grid,
    so that the sum does not depend on its order. If some bring back the best epoch,
    that of the first of them is all there is: they are the same. If nobody came to the
    end, the last state on which they agreed is what is left, from the first that has
    one.

    Args:
        results: In order of replica, at least one.
    """
    ended = [result for result in results if result.finished]
    restored = [result for result in ended if result.restored][:1]
    used = restored or ended or _agreed(results)
    parts = [result.parameters.unpack() for result in used]
    states = [r.optimizer.unpack() for r in ended if r.optimizer is not None]
    final = Final(
        _sum(parts),
        add(states) if states else None,
        average_outcome([result.outcome for result in results]),
        ended[0].schedule if ended else b"",  # there all have agreed
        b"".join(result.steps for result in results),
        bool(restored),
        used[0].met,
    )
    return Packed(final, "result")


def average_outcome(outcomes: Iterable[Outcome | None]) -> Outcome | None:
    """Merge what several replicas leave to the next fit.

    Args:
        outcomes: One per replica; None where it did not even start.

    Returns:
        The mean of each pattern over those that have sent, and the most steps; None
        if there is nothing to merge.
    """
    used = [outcome for outcome in outcomes if outcome is not None]
    if not used:
        return None
    patterns = dict.fromkeys(p for outcome in used for p in outcome.sent)
    means = {p: average_sent([o.sent.get(p) for o in used]) for p in patterns}
    sent = {p: mean for p, mean in means.items() if mean is not None}
    return Outcome(sent, max(outcome.steps for outcome in used))


def _agreed(results: Sequence[Result]) -> Sequence[Result]:
    for result in results:
        parameters = result.parameters.unpack()
        if parameters:
            return [result]
    return results[:1]  # those that failed at their start have nothing


def _sum(parts: Sequence[Parameters]) -> Parameters:
    first = parts[0]
    if first.shared_N is None:
        return first
    total_N: NDArray[np.int64] = np.zeros(first.shared_N.shape, np.int64)
    for part in parts:
        if part.residual_N is not None:
            total_N += part.residual_N
    residual_N = np.clip(total_N, INT32.min, INT32.max).astype(np.int32)
    left = residual_N if residual_N.any() else None
    return replace(first, residual_N=left)
