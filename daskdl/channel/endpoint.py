"""Which replica of which run a channel belongs to, and its bounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from daskdl.channel.routes import FAN_OUT
from daskdl.failures import FailureInjection
from daskdl.timeouts import Timeouts


@dataclass(frozen=True)
class Endpoint:
    """One replica's end of a run.

    Attributes:
        run: Identity of the run.
        replica: Number of the replica.
        size: Parameters of the model.
        grid: Of the run at its start, parameter units.
        outbox_bytes: Bound of what waits to be sent.
        inbox_bytes: Bound of what waits to be applied.
        timeouts: Bounds on waiting.
        routing: ``"plain"`` or ``"mesh"``.
        fan_out: Most replicas that one passes an update on to, in a mesh.
        drops: On purpose: which updates that arrive here are dropped.
        in_step: Replicas make each step together.
    """

    run: int
    replica: int
    size: int
    grid: float
    outbox_bytes: int
    inbox_bytes: int
    timeouts: Timeouts
    routing: str = "plain"
    fan_out: int = FAN_OUT
    drops: Sequence[FailureInjection] = ()
    in_step: bool = False
