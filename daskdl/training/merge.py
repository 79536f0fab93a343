"""From the replicas' results to one; runs on a worker, not on the client."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daskdl.packed import Packed
from daskdl.thresholds import Sent, average_sent
from daskdl.training.base import Parameters
from daskdl.training.optimizer_state import OptimizerState, add
from daskdl.training.task import Result

INT32 = np.iinfo(np.int32)


@dataclass
class Final:
    """What a fit ends with.

    Attributes:
        parameters: Of all replicas together; residuals are already added.
        optimizer: Averaged state; None if the run did not come to its end.
        outcome: Averaged state of the threshold.
        schedule: Where it stands; empty if there is none, or no optimizer.
    """

    parameters: Parameters
    optimizer: OptimizerState | None
    outcome: Sent | None
    schedule: bytes = b""


def merge(results: Sequence[Result]) -> Packed[Final]:
    """Join what the replicas left behind.

    All that came to the end contribute what they had not sent yet: whole steps
    of the grid, so that the sum does not depend on its order. If none did, the
    last state on which they agreed is what is left, from the first that has one.

    Args:
        results: In order of replica, at least one.
    """
    ended = [result for result in results if result.finished]
    parts = [result.parameters.unpack() for result in ended] or [_agreed(results)]
    states = [r.optimizer.unpack() for r in ended if r.optimizer is not None]
    final = Final(
        _sum(parts),
        add(states) if states else None,
        average_sent([result.outcome for result in results]),
        ended[0].schedule if ended else b"",  # there all have agreed
    )
    return Packed(final, "result")


def _agreed(results: Sequence[Result]) -> Parameters:
    parameters = Parameters()  # one that failed at its start has nothing
    for result in results:
        parameters = result.parameters.unpack()
        if parameters.exact is not None or parameters.shared_N is not None:
            break
    return parameters


def _sum(parts: Sequence[Parameters]) -> Parameters:
    first = parts[0]
    if first.shared_N is None:
        return first
    total_N: NDArray[np.int64] = first.shared_N.astype(np.int64)
    for part in parts:
        if part.residual_N is not None:
            total_N += part.residual_N
    clipped_N = np.clip(total_N, INT32.min, INT32.max).astype(np.int32)
    return Parameters(None, clipped_N, None, first.grid, first.buffers)
