"""What one replica sends of its updates: when it tries to, and as far as there is room.

What becomes of what others send is :mod:`daskdl.training.sharer`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from daskdl.channel.base import Channel
from daskdl.compression.compressor import Accumulator, DenseProposal, Frame, Proposal
from daskdl.thresholds import Measured
from daskdl.training.observer import Observer
from daskdl.training.pace import Pace
from daskdl.training.step_clock import StepClock


class Sender:
    """Gives a channel what an accumulator proposes, and takes out what it accepted.

    Args:
        accumulator: Of the replica's module.
        channel: The replica's end of the run.
        pace: When to wait, and when to share.
        observer: Is told of each exchange.
    """

    due: bool  # steps were made since the last exchange was tried
    unshared: int  # steps since the last one that was accepted

    def __init__(
        self,
        accumulator: Accumulator,
        channel: Channel,
        pace: Pace,
        observer: Observer,
    ) -> None:
        self._accumulator = accumulator
        self._channel = channel
        self._pace = pace
        self._observer = observer
        self._clock = StepClock()
        self.due = False
        self.unshared = 0

    def begin_step(self) -> None:
        """The replica waits for nobody now, and trains."""
        self._clock.begin()

    def end_step(self) -> None:
        """The replica has made a step."""
        self._clock.end()
        self.unshared += 1
        with self._observer.encoding:
            self._accumulator.progress.absorb_()
        self.due = True

    def share(self, step: int, made: int) -> None:
        """Send what is to be sent now; without room for it, all stays as it is.

        Args:
            step: Number of the last step, of all replicas alike.
            made: Steps in all, with those of earlier fits.
        """
        self.due = False
        self._clock.chance()
        if self._pace.in_step:
            self._wait_for_room()
        elif not self._channel.has_room():
            return
        with self._observer.encoding:
            proposals = self._proposals(made)
        self._exchange(proposals, step)

    def pass_over(self) -> None:
        """Nobody is there to send to; what was to be shared is dealt with."""
        self.due = False
        self.unshared = 0
        self._clock.chance()
        self._clock.take()

    def _wait_for_room(self) -> None:
        with self._observer.waiting:
            self._channel.wait_for_room()

    def _proposals(self, made: int) -> Sequence[Proposal] | Sequence[DenseProposal]:
        # All that was made in the warm-up goes densely, however late it can.
        if made - self.unshared < self._pace.warmup_steps:
            return [self._accumulator.propose_dense()]
        return self._accumulator.propose()

    def _exchange(
        self, proposals: Sequence[Proposal | DenseProposal], step: int
    ) -> None:
        """Send what there is to send, a frame each, as far as there is room."""
        waiting = [proposal for proposal in proposals if proposal.entries]
        frames = self._send_all(waiting, step)
        if waiting and not frames:
            return
        for proposal in proposals:
            if not proposal.entries:
                self._accumulator.take_(proposal)
        self.unshared = 0
        entries = sum(proposal.entries for proposal in waiting[: len(frames)])
        density = entries / self._accumulator.progress.size
        self._observer.exchanged(density, frames)
        self._learn(density, frames, isinstance(proposals[0], DenseProposal))

    def _learn(self, density: float, frames: Sequence[Frame], dense: bool) -> None:
        """Tell the rules what the exchange took."""
        measured = Measured(
            self._accumulator.progress.size,
            density,
            sum(frame.nbytes for frame in frames),
            dense,
            self._clock.take(),
            self._channel.drained(),
        )
        self._accumulator.sections.learn(measured)

    def _send_all(
        self, waiting: Sequence[Proposal | DenseProposal], step: int
    ) -> list[Frame]:
        """Return the frames that were accepted, of the first of these."""
        frames: list[Frame] = []
        for proposal in waiting:
            if frames and self._pace.in_step:  # all, or it could not be repeated
                self._wait_for_room()
            with self._observer.encoding:
                frame = self._send(proposal, step, last=proposal is waiting[-1])
            if frame is None:
                break
            frames.append(frame)
        return frames

    def _send(
        self, proposal: Proposal | DenseProposal, step: int, *, last: bool
    ) -> Frame | None:
        stamp = self._channel.next_stamp(step)
        frame = proposal.encode(stamp)
        publish = self._channel.publish if last else self._channel.publish_part
        if not publish(stamp, frame):
            return None
        # Only what is on its way leaves the residual.
        self._accumulator.take_(proposal)
        return frame

    def state(self) -> dict[str, Any]:
        """What it goes on from, as plain values; its clock begins anew."""
        return {"unshared": self.unshared, "due": self.due}

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` made; other keys are another's."""
        self.unshared, self.due = state["unshared"], state["due"]
