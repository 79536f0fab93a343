"""What the options of a trainer and of a fit may be; refused before anything else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daskdl.callbacks.base import Callback
from daskdl.data.options import Approach, ReadOptions, check_choice
from daskdl.errors import OptionError
from daskdl.training.base import TrainingMaster

SEED_BELOW = 2**63  # with a replica's number added it still fits torch's 64 bits


@dataclass(frozen=True)
class TrainerOptions:
    """Options of a trainer that every fit has; refused here if they are wrong.

    Attributes:
        master: The way of training.
        device: ``"auto"`` or a torch device.
        seed: Of the model's start, of shuffling and of torch's generators.
        callbacks: Run on workers or on the client.
        progress: Whether to show a bar; None: if standard error is a terminal.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.
    """

    master: TrainingMaster
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.master, TrainingMaster):
            raise OptionError(
                f"master must be a daskdl.TrainingMaster, got {self.master!r}"
            )
        if not _is_whole(self.seed) or not 0 <= self.seed < SEED_BELOW:
            raise OptionError(
                f"seed must be a whole number in [0, 2**63), got {self.seed!r}"
            )
        if not isinstance(self.progress, bool | None):
            raise OptionError(
                f"progress must be True, False or None, got {self.progress!r}"
            )
        _check_callbacks(self.callbacks)
        _check_device(self.device)


@dataclass(frozen=True)
class FitOptions:
    """The arguments of a fit; refused here if they are wrong.

    Attributes:
        read: How the data are read.
        epochs: How many times to go through them.
        shuffle: Whether in a new order each time.
        prefetch: Parts with rows of so many batches are loaded meanwhile.
        approach: Whether batch files are written first.
        drop_last: Whether batches of fewer rows are not trained on.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> FitOptions(ReadOptions(32), epochs=0)
        Traceback (most recent call last):
        daskdl.errors.OptionError: epochs must be a whole number >= 1, got 0
    """

    read: ReadOptions
    epochs: int = 1
    shuffle: bool = True
    prefetch: int = 2
    approach: Approach = "direct"
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        for name in ("shuffle", "drop_last"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"{name} must be True or False, got {value!r}")
        check_whole("prefetch", self.prefetch, 0)
        check_choice("approach", self.approach, ("direct", "export"))


def check_type(name: str, value: object, wanted: type) -> None:
    """Refuse what is not of a type."""
    if not isinstance(value, wanted):
        hint = f"{wanted.__module__}.{wanted.__qualname__}"
        raise OptionError(f"{name} must be a {hint}, got {value!r}")


def check_whole(name: str, value: Any, least: int, other: str = "") -> None:
    """Refuse what is not a whole number of at least so much, or `other`."""
    if not _is_whole(value) or value < least:
        allowed = f"a whole number >= {least} {other}".rstrip()
        raise OptionError(f"{name} must be {allowed}, got {value!r}")


def check_bound(name: str, value: Any) -> None:
    """Refuse what is neither None nor a time > 0, seconds."""
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise OptionError(f"{name} must be seconds > 0 or None, got {value!r}")


def check_places(master: TrainingMaster) -> None:
    """Refuse how many replicas a way of training is to have, and how they are joined.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.
    """
    if master.replicas_per_worker != "auto":
        check_whole("replicas_per_worker", master.replicas_per_worker, 1, "or 'auto'")
    check_whole("min_replicas", master.min_replicas, 1)
    check_whole("fan_out", master.fan_out, 1)
    check_bound("rejoin_timeout", master.rejoin_timeout)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, Sequence):
        raise OptionError(
            f"callbacks must be a list of daskdl.Callback, got {callbacks!r}"
        )
    wrong = [c for c in callbacks if not isinstance(c, Callback)]
    if wrong:
        raise OptionError(f"callbacks must be daskdl.Callback, got {wrong[0]!r}")


def _check_device(device: Any) -> None:
    # No bare number: what torch makes of it depends on the machine.
    if not isinstance(device, str | torch.device):
        raise OptionError(f"device must be 'auto' or a torch device, got {device!r}")
    try:
        if device != "auto":
            torch.device(device)
    except RuntimeError as error:
        raise OptionError(
            f"device must be 'auto' or a torch device, got {device!r}"
        ) from error
