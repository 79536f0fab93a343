"""What a step and an exchange cost one replica, as numbers. Nothing is measured."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Times of one replica, means, seconds; an update is all frames of an exchange.

    Attributes:
        rows: Of a step.
        parameters: Trainable ones.
        threads: That torch computed with.
        gradients_s: Forward and backward pass.
        optimizer_s: Its step.
        encode_s: Of an exchange: find what is to be sent, make the frames, take it out
            of the residual.
        apply_s: Of one update of another replica, where training waits for it.
        decode_s: Of one update of another replica, on the event loop.
        request_s: Of one request, at either end, on the event loop.
        item_s: Of one update in a request, at either end, on the event loop.
        update_bytes: Of an update.
        density: Entries sent / parameters.
    """

    rows: int
    parameters: int
    threads: int
    gradients_s: float
    optimizer_s: float
    encode_s: float
    apply_s: float
    decode_s: float
    request_s: float
    item_s: float
    update_bytes: float
    density: float

    @property
    def step_s(self) -> float:
        """Of a step without any exchange, seconds."""
        return self.gradients_s + self.optimizer_s

    def towards(self, other: "Costs", share: float) -> "Costs":
        """Times on the way to others: 0 are these, 1 are the others; beyond, on.

        What is no time stays. No time becomes less than the smaller of the two.
        """
        changed = {}
        for field in dataclasses.fields(self):
            if field.name.endswith("_s"):
                own, others = getattr(self, field.name), getattr(other, field.name)
                moved = own + share * (others - own)
                changed[field.name] = max(moved, min(own, others))
        return dataclasses.replace(self, **changed)

    def accumulated(self, batches: int) -> "Costs":
        """Steps of so many batches, as `accumulate` makes them."""
        return dataclasses.replace(
            self, rows=batches * self.rows, gradients_s=batches * self.gradients_s
        )

    def thinned(self, factor: float) -> "Costs":
        """Updates with a fraction of the entries; only bytes are taken to be fewer."""
        return dataclasses.replace(
            self, update_bytes=self.update_bytes / factor, density=self.density / factor
        )

    def gathered(self, updates: int) -> "Costs":
        """So many updates in one: nothing of them is taken to be saved."""
        return dataclasses.replace(
            self,
            apply_s=updates * self.apply_s,
            decode_s=updates * self.decode_s,
            update_bytes=updates * self.update_bytes,
            density=min(1.0, updates * self.density),
        )


def mean(several: Sequence[Costs]) -> Costs:
    """Of some processes that did the same: no two cores are alike.

    Args:
        several: At least one.
    """
    first = several[0]
    changed = {
        field.name: sum(getattr(each, field.name) for each in several) / len(several)
        for field in dataclasses.fields(first)
        if isinstance(getattr(first, field.name), float)
    }
    return dataclasses.replace(first, **changed)


@dataclass(frozen=True)
class Measured:
    """What was measured on this machine.

    Attributes:
        alone: Costs of one process.
        cores: Of this machine.
        together: Costs of each while several processes did the same, the mean; None if
            that was not measured.
        processes: How many did, >= 2; 1 if that was not measured.
    """

    alone: Costs
    cores: int
    together: Costs | None = None
    processes: int = 1

    @property
    def most_at_once(self) -> int:
        """How many processes have cores for all their threads."""
        return max(1, self.cores // self.alone.threads)

    def here(self, workers: int) -> Costs:
        """Costs of each of so many processes on this machine.

        They share its memory and caches. What that costs grows evenly with the number
        of processes, until there are as many as there are cores for; that more have to
        take turns is not in it.
        """
        if self.together is None:
            return self.alone
        others = min(workers, self.most_at_once) - 1
        return self.alone.towards(self.together, others / (self.processes - 1))

    def changed(self, change: Callable[[Costs], Costs]) -> "Measured":
        """With other costs."""
        together = None if self.together is None else change(self.together)
        return dataclasses.replace(self, alone=change(self.alone), together=together)
