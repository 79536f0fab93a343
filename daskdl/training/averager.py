"""One replica that averages its model with the others' now and then."""

import contextlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import Arrays, Barrier, Routes
from daskdl.training.averagings import Averagings
from daskdl.training.exchange import Excess, Exchange
from daskdl.training.outcome import Outcome
from daskdl.training.parameters import Parameters
from daskdl.training.reduction import Reduction
from daskdl.training.replica_state import ReplicaState
from daskdl.training.rounds import Round, Said, round_of
from daskdl.training.seat import Seat
from daskdl.training.states import (
    AVERAGER,
    PARAMETERS,
    Resumed,
    State,
    restoring,
)
from daskdl.training.statistics import Exchanged, Statistics
from daskdl.training.tensors import largest_in, trained_in

MEETING = "average"  # key of the barrier, of one round after the other
STATE = "state "  # before the names of a snapshot's arrays


class Averager(Exchange):
    """One replica's part in averaging.

    Args:
        seat: Where to work.
        state: Of the replica there.
        frequency: Steps between two averagings.
        fan_out: Of the tree along which means are made.
        made: Steps made before.
    """

    learning_rate_scale = scale = 1.0

    def __init__(
        self,
        seat: Seat,
        state: ReplicaState,
        frequency: int,
        fan_out: int,
        made: int,
    ) -> None:
        self._module = seat.module
        self._channel = seat.channel
        self._replica = seat.replica
        self._frequency = frequency
        self._fan_out = fan_out
        self._state = state
        self._said = Said(seen=0, mean=0, examples=0)
        self._since = 0  # steps since the last mean
        self._frozen = seat.frozen
        self._behind = False  # others may have a later mean
        self._made = made
        self._done = Averagings()
        self.exchange_tried = False
        if seat.snapshot is not None:
            self._begin(seat.snapshot)
        if seat.resumed is not None and seat.resumed.kind == AVERAGER:
            self._resume(seat.resumed)
        self.averages_optimizer = state.averages_optimizer
        self._agreed = Parameters.of(seat.module)
        if seat.residual is not None:
            state.deliver_(seat.residual, seat.module)

    def _begin(self, snapshot: Mapping[str, Any]) -> None:
        # What a replica was doing when it was asked. The common state is fetched
        # before the first step; this counts if nobody is left by then.
        names = [name for name in snapshot if name.startswith(STATE)]
        self._state.load_({name.removeprefix(STATE): snapshot[name] for name in names})
        self._made = snapshot["step"]
        self._said = Said(seen=0, mean=-1, examples=0)
        self._behind = True

    def _resume(self, resumed: Resumed) -> None:
        common = resumed.common
        resumed.check(State(AVERAGER, {"outer": None, "made": 0, "met": 0}, {}))
        with restoring(f"{resumed.common_at}: exchange.outer"):
            if common["outer"] is not None:
                self._state.restore_outer_(common["outer"])
        self._made = common["made"]
        # The number of a meeting says along which tree its mean is made.
        self._said = Said(seen=common["met"], mean=common["met"], examples=0)

    @override
    def before_step(self, lap: int) -> None:
        self._done.begin_step()
        while self._behind:
            latest = self._meet().latest
            self._behind = self._said.mean < latest
        self._state.depart_()

    @override
    def after_step(self, lap: int, examples: int) -> None:
        self._made += 1
        self._frozen.after_step()
        self._done.stepped()
        self._since += 1
        examples += self._said.examples
        self._said = self._said._replace(examples=examples, rests=False)
        self.exchange_tried = self._since == self._frequency
        if self.exchange_tried:
            self._average_all()

    def _average_all(self) -> None:
        """Meet until what was trained here is in a mean."""
        while self._said.examples:
            self._meet()
        self._channel.complete(self._made)

    @override
    def rest(self, lap: int) -> None:
        self._frozen.look()  # after the last step of a lap too: its mean is made now
        self._said = self._said._replace(rests=True)
        self._average_all()
        self._offer_state()
        self._channel.stand_by(_note(self._said._replace(parked=True)))
        self._behind = True

    @override
    def end_lap(self, lap: int, examples: int) -> None:
        while not self._meet(ended=True).over:
            pass
        self._behind = False
        self._agreed = Parameters.of(self._module)
        self._channel.complete(self._made, done=lap)

    def _meet(self, *, ended: bool = False) -> Round:
        """Come together once, and do what is to be done there."""
        digest = self.digest() if ended else 0
        owes = bool(self._state.feedback.residual)
        self._said = self._said._replace(ended=ended, digest=digest, owes=owes)
        if not self._said.examples:
            self._offer_state()
        kind = Barrier.AGREE if ended else Barrier.ROUND
        with self._done.waiting:
            gathered = self._channel.gather(MEETING, _note(self._said), kind)
        if self._replica in gathered.gone:
            raise Stopped("the others have gone on without this replica")
        said = {r: note["said"] for r, note in gathered.notes.items()}
        decided = round_of(said, gathered.gone)
        # By now everybody has fetched what was offered for the meeting before.
        self._channel.withdraw(but=self._state_name)
        self._said = self._said._replace(seen=decided.number)
        self._state.feedback.settle_(decided.latest)
        if decided.weights:
            self._average(decided)
        elif self._replica not in decided.current:
            self._fetch_state(decided)
        return decided

    def _average(self, decided: Round) -> None:
        stamp = self._channel.next_stamp(self._made)._replace(sequence=decided.number)
        terms = self._state.terms(stamp, whole=decided.whole)
        routes = Routes(decided.number, decided.members, self._fan_out)
        reduction = Reduction(self._channel, routes, decided.root, self._replica)

        def finish(total: Arrays) -> Arrays:
            late = set(decided.members) - set(decided.current)
            return self._state.complete(total) if late else total

        own = terms.own(decided.weights.get(self._replica))
        result = reduction.result(own, terms.add, finish)
        if result is not None:
            anew = not decided.settles
            self._done.averaged(terms.kind, terms.sent_bytes, anew=anew)
            self._state.take_mean_(terms.mean(result), step=anew)
            self._has(decided.number)

    def _has(self, mean: int) -> None:
        self._said = self._said._replace(mean=mean, examples=0)
        self._since = 0
        self._state.feedback.settle_(mean)

    @property
    def _state_name(self) -> str:
        return f"state {self._said.mean}"

    def _offer_state(self) -> None:
        self._channel.offer(self._state_name, self._state.whole())

    def _fetch_state(self, decided: Round) -> None:
        start = self._replica % len(decided.donors)
        for donor in decided.donors[start:] + decided.donors[:start]:
            state = self._channel.fetch(donor, f"state {decided.latest}")
            if state is not None:
                self._state.load_(state)
                self._has(decided.latest)
                return

    @override
    def excess(self, *, whole: bool) -> Excess | None:
        far = largest_in(self._module) if whole else 0.0
        return None if math.isfinite(far) else Excess(far, math.nan)

    @override
    def showing_agreed(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def digest(self) -> int:
        return self._state.digest()

    @override
    def statistics(self) -> Statistics:
        return self._done.statistics()

    @override
    def exchanged(self) -> Exchanged:
        if not self.exchange_tried:
            return Exchanged(wait_s=self._done.waiting.seconds)
        return self._done.exchanged(self._state.residual_norm())

    @override
    def opened(self) -> Exchange:
        return self

    @override
    def snapshot(self) -> dict[str, Any]:
        whole = self._state.whole()
        state = {f"{STATE}{name}": array for name, array in whole.items()}
        return {"received": [], "grid": 1.0, "step": self._made, **state}

    @override
    def state(self) -> State:
        common = {
            PARAMETERS: trained_in(self._module),
            "outer": self._state.outer(),
            "made": self._made,
            "met": self._said.seen,
        }
        return State(AVERAGER, common, {})

    @override
    def hand_over(self) -> None:
        pass  # the others average without it: at most one round of it is lost

    @override
    def final(self) -> Parameters:
        return self._agreed

    @override
    def agreed(self) -> Parameters:
        return self._agreed

    @override
    def outcome(self) -> Outcome:
        return Outcome({}, self._made)


def _note(said: Said) -> dict[str, list[int]]:
    return {"said": list(said)}
