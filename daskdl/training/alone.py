"""The exchange of a replica that is the only one: plain PyTorch.

Nothing is flattened, rounded, encoded or scaled, so that the result equals a
plain loop over the same batches bit for bit.
"""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from daskdl.training.exchange import Excess, Exchange
from daskdl.training.outcome import Outcome
from daskdl.training.parameters import Parameters
from daskdl.training.seat import Seat
from daskdl.training.states import ALONE, PARAMETERS, State
from daskdl.training.statistics import Statistics
from daskdl.training.tensors import largest_in, trained_in


class Alone(Exchange):
    """One replica; there is nobody to share with.

    Args:
        seat: Where to work.
        scale: Factor on the learning rate.
        share: Makes the exchange that takes over when others come; told how many
            steps were made by then.
    """

    learning_rate_scale: float
    scale: float

    def __init__(
        self, seat: Seat, scale: float, share: Callable[[int], Exchange]
    ) -> None:
        self.learning_rate_scale = self.scale = scale
        self._share = share
        self._module = seat.module
        self._sent = {} if seat.last is None else seat.last.sent
        self._made = 0 if seat.last is None else seat.last.steps
        self._agreed = Parameters.of(seat.module)
        if seat.residual is not None:  # there is nobody to share it with
            seat.residual.deliver_(seat.module)
        self._steps = 0

    @override
    def before_step(self, lap: int) -> None:
        pass

    @override
    def after_step(self, lap: int, examples: int) -> None:
        self._steps += 1
        self._made += 1

    @override
    def rest(self, lap: int) -> None:
        pass

    @override
    def end_lap(self, lap: int, examples: int) -> None:
        self._agreed = Parameters.of(self._module)

    @override
    def excess(self, *, whole: bool) -> Excess | None:
        far = largest_in(self._module) if whole else 0.0
        return None if math.isfinite(far) else Excess(far, math.nan)

    @override
    def showing_agreed(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def digest(self) -> int:
        return 0

    @override
    def statistics(self) -> Statistics:
        steps, self._steps = self._steps, 0
        return Statistics(0, 0.0, math.nan, 0.0, 0, steps)

    @override
    def opened(self) -> Exchange:
        return self._share(self._made)

    @override
    def snapshot(self) -> dict[str, Any]:
        raise AssertionError("it is opened before")

    @override
    def state(self) -> State:
        sent = {p: (s.threshold, s.density) for p, s in self._sent.items()}
        common = {PARAMETERS: trained_in(self._module), "made": self._made}
        return State(ALONE, {**common, "sent": sent}, {})

    @override
    def hand_over(self) -> None:
        pass

    @override
    def final(self) -> Parameters:
        return Parameters.of(self._module)

    @override
    def agreed(self) -> Parameters:
        return self._agreed

    @override
    def outcome(self) -> Outcome:
        return Outcome(self._sent, self._made)


def may_be_alone(seat: Seat) -> bool:
    """Whether a replica is the only one, and has nobody's residual to deliver."""
    resumed = seat.resumed
    begins = seat.snapshot is None and (resumed is None or resumed.kind == ALONE)
    return len(seat.members) == 1 and begins
