"""One replica that shares its updates as they happen."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import Gathered
from daskdl.channel.inbox import Arrived
from daskdl.channel.protocol import Barrier
from daskdl.compression.compressor import Accumulator
from daskdl.compression.flat import (
    Buffers,
    average_buffers,
    average_frozen,
    load_buffers_,
    pack_buffers,
)
from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.training.exchange import Excess, Exchange
from daskdl.training.observer import SAMPLE, Observer
from daskdl.training.outcome import Outcome
from daskdl.training.pace import Pace
from daskdl.training.parameters import Parameters
from daskdl.training.seat import Seat
from daskdl.training.sender import Sender
from daskdl.training.states import SHARER, Resumed, State, restoring
from daskdl.training.statistics import Exchanged, Statistics


class Sharer(Exchange):
    """One replica's part in sharing updates.

    If a barrier finds it the only one that is there, shared is its own from then on: it
    takes in the residual as a whole, and nothing is encoded. With the first snapshot
    that it gives to a newcomer that ends.

    Args:
        seat: Where to work.
        accumulator: Of the module there.
        pace: When to wait, and when to share.
        scale: How much an update of each of so many replicas counts.
        made: Steps that were made before those that are counted here: in earlier
            fits, or alone. A newcomer learns it from its snapshot.
    """

    learning_rate_scale: float
    scale: float

    def __init__(
        self,
        seat: Seat,
        accumulator: Accumulator,
        pace: Pace,
        scale: Callable[[int], float],
        made: int,
    ) -> None:
        self._pace = pace
        self._scale = scale
        self._module = seat.module
        self._frozen = seat.frozen
        self._channel = seat.channel
        self._replica = seat.replica
        self._accumulator = accumulator
        self._progress = accumulator.progress
        self._weigh(len(seat.members))
        self._made = made
        self._step = 0
        self._observer = Observer()
        self._sender = Sender(accumulator, seat.channel, pace, self._observer)
        self._frozen_bytes = 0  # in the last note
        self._clipped_before = 0.0  # at the last `statistics`
        self._own = False  # nobody else has shared, or will have what it was before
        self._served = False  # a snapshot was given since the last barrier began
        if seat.snapshot is not None:
            self._begin(seat.snapshot)
        if seat.resumed is not None and seat.resumed.kind == SHARER:
            self._resume(seat.resumed)
        if seat.residual is not None:
            place, founders = seat.members.index(seat.replica), len(seat.members)
            share_N = seat.residual.share_N(place, founders)
            self._progress.add_residual_(share_N, seat.residual.grid)
        self._agreed: Parameters
        self._keep_agreed()

    def _weigh(self, replicas: int) -> None:
        self.scale = self._scale(replicas)
        self.learning_rate_scale = self._progress.scale_(self.scale)

    def _begin(self, snapshot: Mapping[str, Any]) -> None:
        self._progress.replace_shared_(snapshot["counts_N"], snapshot["grid"])
        load_buffers_(
            self._module, Buffers(snapshot["floating_F"], snapshot["integer_I"])
        )
        self._frozen.load_(snapshot)
        self._made, self._step = snapshot["made"], snapshot["step"]

    def _resume(self, resumed: Resumed) -> None:
        common, state = resumed.common, self.state()
        # Patterns may be other ones.
        own = {**state.own, "sections": {}}
        resumed.check(state._replace(own=own))
        with restoring(f"{' or '.join(resumed.own_at)}: exchange"):
            self._accumulator.restore_(common["accumulator"], resumed.own)
            for part in resumed.own[:1]:
                self._sender.restore_(part)
        self._made, self._step = common["made"], common["step"]
        self._clipped_before = self._accumulator.clipped
        self._channel.align(self._step, self._progress.grid)

    @override
    def before_step(self, lap: int) -> None:
        pace = self._pace
        self._observer.begin_step()
        self._weigh(1 + len(self._channel.others()))
        if pace.max_staleness is not None and self._step % pace.exchange_every == 0:
            with self._observer.waiting:
                self._channel.wait_for_others(self._step, lap, pace.max_staleness)
        self._observer.leads(pace.lead(self._step, self._channel.lead(self._step, lap)))
        self._take_in(self._step if pace.in_step else None)
        self._sender.begin_step()

    @override
    def after_step(self, lap: int, examples: int) -> None:
        pace = self._pace
        self._step += 1
        self._frozen.after_step()
        self._sender.end_step()
        self.exchange_tried = self._step % pace.exchange_every == 0
        if self.exchange_tried:
            self._share()
        if pace.says(self._step):
            self._channel.complete(self._step)

    def _share(self) -> None:
        if self._own:
            if self._progress.strict:  # else it would not see its own progress
                self._progress.hand_over_()
            self._sender.pass_over()
            return
        self._sender.share(self._step, self._made + self._step)

    def _take_in(self, up_to_step: int | None = None) -> None:
        self._apply(self._channel.receive(up_to_step))

    def _apply(self, arrived: Arrived) -> None:
        updates, folded_N = arrived
        with self._observer.applying:
            if folded_N is not None:
                self._progress.apply_counts_(folded_N)
            for update in updates:
                self._progress.apply_(update)

    @override
    def rest(self, lap: int) -> None:
        if self._sender.due:
            self._share()
        self._channel.complete(self._step, done=lap)

    @override
    def end_lap(self, lap: int, examples: int) -> None:
        self.rest(lap)
        self._frozen.look()
        buffers, frozen = pack_buffers(self._module), self._frozen.take()
        self._frozen_bytes = sum(array.nbytes for array in frozen.values())
        key = f"end of lap {lap}"
        self._served = False
        gathered = self._channel.gather(
            key,
            {
                "sequence": self._channel.published(),
                "step": self._step,
                "examples": examples,
                "floating": buffers.floating_F,
                "integer": buffers.integer_I,
                **frozen,
            },
            Barrier.AGREE,
        )
        self._agree(key, gathered)

    def _agree(self, key: str, gathered: Gathered) -> None:
        notes = gathered.notes
        published = {r: note["sequence"] for r, note in notes.items()}
        self._channel.agree(key, published, gathered.gone, self._load)
        self._take_in()
        # Whoever joins later begins with a snapshot that is made later, unless one was
        # made while this replica was on its way here.
        self._own = gathered.counted.get("present") == 1 and not self._served
        if self._own:
            self._progress.hand_over_()
        self._step = max(note["step"] for note in notes.values())
        self._channel.align(self._step, self._progress.regrid_())
        parts = [
            (Buffers(note["floating"], note["integer"]), note["examples"])
            for _, note in sorted(notes.items())
        ]
        load_buffers_(self._module, average_buffers(parts))
        changed = [(note, note["examples"]) for _, note in sorted(notes.items())]
        self._frozen.load_(average_frozen(changed))
        self._keep_agreed()

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of another replica; what only this one has stays."""
        self._progress.replace_shared_(snapshot["counts_N"], snapshot["grid"])

    def _keep_agreed(self) -> None:
        progress, buffers = self._progress, pack_buffers(self._module)
        counts_N, frozen = progress.shared_counts(), self._frozen.take()
        self._agreed = Parameters(None, counts_N, None, progress.grid, buffers, frozen)

    @override
    def excess(self, *, whole: bool) -> Excess | None:
        far = self._progress.farthest() if whole else self._accumulator.cut
        if far <= self._progress.reach:
            return None
        return Excess(far, MAX_COUNT * self._progress.grid)

    @override
    def showing_agreed(self) -> AbstractContextManager[None]:
        return self._progress.showing_shared()

    @override
    def digest(self) -> int:
        return self._progress.digest()

    @override
    def statistics(self) -> Statistics:
        accumulator = self._accumulator
        thresholds = [sent.threshold for sent in accumulator.sections.sent.values()]
        before, self._clipped_before = self._clipped_before, accumulator.clipped
        done = self._observer.statistics(thresholds, accumulator.clipped - before)
        return done._replace(frozen_bytes=self._frozen_bytes)

    @override
    def exchanged(self) -> Exchanged:
        return self._observer.step(self._accumulator.sections.samples(SAMPLE))

    @override
    def opened(self) -> Exchange:
        return self

    @override
    def snapshot(self) -> dict[str, Any]:
        arrived, received = self._channel.take_all()
        self._apply(arrived)
        if self._own:
            self._progress.hand_over_()
        self._own, self._served = False, True
        self._frozen.look()
        buffers = pack_buffers(self._module)
        return {
            "received": [[o, last, list(more)] for o, (last, more) in received.items()],
            "counts_N": self._progress.shared_counts(),
            "grid": self._progress.grid,
            "made": self._made,
            "step": self._step,
            "floating_F": buffers.floating_F,
            "integer_I": buffers.integer_I,
            **self._frozen.take(),
        }

    @override
    def state(self) -> State:
        shared, own = self._accumulator.state()
        common = {"accumulator": shared, "made": self._made, "step": self._step}
        return State(SHARER, common, {**own, **self._sender.state()})

    @override
    def hand_over(self) -> None:
        self._take_in()
        grid = self._progress.grid
        stamp = self._channel.next_stamp(self._step)
        frame = codec.encode_dense(stamp, grid, self._progress.hand_over_())
        self._channel.publish_last(stamp, frame)

    @override
    def final(self) -> Parameters:
        residual_N = self._progress.residual_counts()
        return dataclasses.replace(self._agreed, residual_N=residual_N)

    @override
    def agreed(self) -> Parameters:
        return self._agreed

    @override
    def outcome(self) -> Outcome:
        return Outcome(self._accumulator.sections.sent, self._made + self._step)
