"""Steps and exchanges of one replica without others, each part timed.

They are those of a replica: the same stepper, the same compressor, the same codec. In
the place of another replica's update the replica's own last one comes back to it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl import codec
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.data.models import trainable
from daskdl.errors import DivergedError
from daskdl.objective import Objective
from daskdl.thresholds import Sent
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import Stepper, Stepping

Frames = Sequence[NDArray[np.uint8]]

SETTLING = 100  # exchanges, at most, in which a threshold may settle
SETTLING_S = 1.0  # and how long, seconds, with steps; as long again without
LEAP = 3  # how often more a threshold's last change is made while it settles


@dataclass(frozen=True)
class Script:
    """What is rehearsed; packed, so that it works on copies only.

    Attributes:
        model: The user's.
        objective: What to make small.
        optimizer: Makes one from parameters.
        rows: X and y of a step.
        master: How updates are shared.
        threads: That torch computes with.
        device: As of a trainer.
    """

    model: nn.Module
    objective: Objective
    optimizer: Any
    rows: tuple[NDArray[Any], NDArray[Any]]
    master: GradientSharing
    threads: int
    device: str = "auto"


class Times(NamedTuple):
    """Of one step, seconds; and what its exchange made."""

    gradients_s: float
    optimizer_s: float
    encode_s: float
    apply_s: float
    decode_s: float
    update_bytes: float
    density: float


class Scene:
    """A replica on its own.

    Args:
        script: The caller's own copy; its model is trained.
        device: Where to compute.

    Attributes:
        rows: Of a step.
        threads: That torch computes with.
        parameters: Trainable ones.
        frames: The last update.
    """

    rows: int
    threads: int
    parameters: int
    frames: Frames

    def __init__(self, script: Script, device: torch.device) -> None:
        master, module = script.master, script.model.to(device).train()
        parameters = FlatParameters(module)
        self._flats = [group.flat for group in parameters.groups]
        self._compressor = Compressor(
            parameters, master.threshold, master.residual, master.apply
        )
        self._vector = self._compressor.vector
        optimizer: Optimizer = script.optimizer(trainable(module))
        self._stepper = Stepper(module, script.objective, optimizer, Stepping(), device)
        # As of one of two; with more, each sends less, and its threshold follows.
        self._scale = self._vector.set_scale_(master.scale(2))
        self._every = master.exchange_every
        self._data, self._device = script.rows, device
        self._random = np.random.default_rng(0)
        self._exchanges = 0
        self.rows, self.threads = len(script.rows[0]), script.threads
        self.parameters = self._vector.size
        self.frames = ()

    def step(self) -> Times:
        """Make the steps up to an exchange, the last one timed, and the exchange.

        Before that last one the former update is taken in.

        Raises:
            DivergedError: If the loss is not finite.
        """
        for _ in range(self._every - 1):
            self._move()
            self._vector.sync_from_parameters_()
        marks = [self._now()]
        updates = [codec.decode(frame.data) for frame in self.frames]
        marks.append(self._now())
        for update in updates:
            self._vector.apply_(update)
        marks.append(self._now())
        marks += self._move()
        entries = self._exchange()
        marks.append(self._now())
        decode_s, apply_s, gradients_s, optimizer_s, encode_s = np.diff(marks).tolist()
        return Times(
            gradients_s,
            optimizer_s,
            encode_s,
            apply_s,
            decode_s,
            sum(frame.nbytes for frame in self.frames),
            entries / self.parameters,
        )

    def _move(self) -> tuple[float, float]:
        """Make a step; when its gradients were there, and when it was made."""
        value = self._stepper.backward([self._batch()])
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss became {value} in a rehearsal of some steps; lower the "
                "learning rate of optimizer, or look for NaN in batch"
            )
        computed = self._now()
        self._stepper.update(self._scale)
        return computed, self._now()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the batch, drawn anew: one and the same would be learned by heart."""
        x, y = self._data
        drawn = self._random.integers(0, len(x), len(x))
        return torch.from_numpy(x[drawn]), torch.from_numpy(y[drawn])

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _exchange(self) -> int:
        """Make an update of what moved and take it out; how many entries it has."""
        self._exchanges += 1
        compressor = self._compressor
        self._vector.sync_from_parameters_()
        updates = compressor.propose()
        stamp = codec.Stamp(0, 0, self._exchanges, self._exchanges)
        self.frames = [u.encode(stamp) for u in updates if u.entries]
        for update in updates:
            compressor.commit_(update)
        return sum(update.entries for update in updates)

    def settle(self) -> None:
        """Let the thresholds come to where they are after some hundred steps.

        A threshold moves by a few per cent in each exchange. So each of its changes is
        made several times over, until no threshold moves on, first while steps are
        made. Where these take too long, what the last one moved is then made again and
        again, without computing it anew; where the parameters were brought by that,
        they are brought back from, and what is in the residual stays.
        """
        if self._settles(self.step):
            return
        before = [flat.clone() for flat in self._flats]
        self._move()
        pairs = zip(self._flats, before, strict=True)
        movement = [self._every * (flat - former) for flat, former in pairs]
        self._settles(lambda: self._repeat(movement))
        self._vector.apply_counts_(self._way_to(before))

    def _settles(self, exchange: Callable[[], object]) -> bool:
        """Whether the thresholds moved no further in the end."""
        deadline = time.perf_counter() + SETTLING_S
        changes: Mapping[str, float] = {}
        for _ in range(SETTLING):
            former_changes, sent = changes, self._compressor.sent
            exchange()
            changes = _changes(sent, self._compressor.sent)
            if not _moving(former_changes, changes):
                return True
            if time.perf_counter() > deadline:
                break
            self._leap(changes)
        return False

    def _repeat(self, movement: Sequence[torch.Tensor]) -> None:
        for flat, moved in zip(self._flats, movement, strict=True):
            flat.add_(moved)
        self._exchange()

    def _way_to(self, values: Sequence[torch.Tensor]) -> NDArray[np.int32]:
        """From the parameters as they are to these, in steps of the grid."""
        grid, pairs = self._vector.grid, zip(values, self._flats, strict=True)
        ways = [((to.double() - flat.double()) / grid).round() for to, flat in pairs]
        return torch.cat([way.int().cpu() for way in ways]).numpy()

    def _leap(self, changes: Mapping[str, float]) -> None:
        for pattern, change in changes.items():
            group = self._compressor.groups[pattern]
            if group.sent is not None:
                threshold = group.sent.threshold * change**LEAP
                group.sent = group.sent._replace(threshold=threshold)


def _changes(before: Mapping[str, Sent], now: Mapping[str, Sent]) -> dict[str, float]:
    """By what factor each threshold has changed."""
    return {p: s.threshold / before[p].threshold for p, s in now.items() if p in before}


def _moving(former: Mapping[str, float], changes: Mapping[str, float]) -> bool:
    """Whether a threshold moves on: it changes, and not back again."""
    return any(
        change != 1 and (former.get(pattern, change) > 1) == (change > 1)
        for pattern, change in changes.items()
    )
