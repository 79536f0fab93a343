"""What an exchange goes on from: between two epochs, and in another run.

Plain values and tensors, no files; :mod:`daskdl.training.resuming` reads them from
those of a checkpoint.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daskdl.errors import CodecError, DaskDLError, SaveError
from daskdl.thresholds import Sent
from daskdl.training.outcome import Outcome

# Kinds of the states of exchanges.
ALONE, SHARER, AVERAGER = "alone", "sharer", "averager"
PARAMETERS = "parameters"  # in what is common, where a module has them as they are


class State(NamedTuple):
    """What an exchange goes on from, between two epochs: plain values and tensors.

    The tensors may be those that go on changing.
    """

    kind: str  # of the exchange
    common: Mapping[str, Any]  # the same for all replicas
    own: Mapping[str, Any]


class Resumed(NamedTuple):
    """What one replica goes on from, of the states of another run."""

    kind: str  # of the exchanges
    common: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]  # of replicas whose part it takes, maybe of none
    common_at: str = "what is common"  # where it was read, for messages
    own_at: Sequence[str] = ()

    def check(self, state: State) -> None:
        """Refuse what is not like the state of an exchange that is to go on from it.

        Raises:
            SaveError: Naming the file and the field.
        """
        check_like(state.common, self.common, f"{self.common_at}: exchange")
        for own, at in zip(self.own, self.own_at, strict=False):
            check_like(state.own, own, f"{at}: exchange")

    @property
    def last(self) -> Outcome | None:
        """What one that was alone leaves to any other exchange; None of others."""
        if self.kind != ALONE:
            return None
        with restoring(f"{self.common_at}: exchange"):
            two = self.common["sent"].items()
            sent = {p: Sent(float(t), float(d)) for p, (t, d) in two}
            check_like(0, self.common["made"], "made")  # steps
        return Outcome(sent, self.common["made"])


@contextlib.contextmanager
def restoring(what: str) -> Iterator[None]:
    """What is read in here is damaged if it cannot be gone on from.

    Args:
        what: The file and the field.

    Raises:
        SaveError: In place of what a wrong value makes Python and torch raise.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, SaveError):
            raise SaveError(f"{what}: {error}") from error
        if isinstance(error, DaskDLError) and not isinstance(error, CodecError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise SaveError(f"{what} is damaged: {reason}") from error


def check_like(own: Any, found: Any, what: str, *, loose: bool = False) -> None:
    """Refuse what was read if it is not like what would be written.

    Types, fields, lengths and shapes are compared, and no values. None is like all.

    Args:
        own: That would be written.
        found: That was read; it may have more fields.
        what: It is.
        loose: It is of another library, of any version, or of the user's own class:
            lists and tensors may be of any length, None stands for anything, private
            fields may be missing, and private lists are not looked into.

    Raises:
        SaveError: Naming the field.
    """
    if isinstance(own, Tensor):
        fits = isinstance(found, Tensor) and (loose or found.shape == own.shape)
        _check(fits, own, found, what)
    elif isinstance(own, Mapping):
        _check(isinstance(found, Mapping), own, found, what)
        for name in filter(lambda name: isinstance(name, str), own):
            private = loose and name.startswith("_")
            if name not in found and not private:
                raise SaveError(f"{what}.{name} is missing")
            if name in found and not (private and isinstance(own[name], list)):
                check_like(own[name], found[name], f"{what}.{name}", loose=loose)
    elif isinstance(own, list | tuple):
        fits = isinstance(found, list | tuple)
        _check(fits and (loose or len(found) == len(own)), own, found, what)
        for i, (ours, theirs) in enumerate(zip(own, found, strict=not loose)):
            check_like(ours, theirs, f"{what}[{i}]", loose=loose)
    elif own is not None and not (loose and found is None):
        kinds = (int, float) if isinstance(own, int | float) else (type(own),)
        fits = isinstance(found, kinds) and isinstance(found, bool) <= isinstance(
            own, bool | float
        )
        _check(fits, own, found, what)


def _check(fits: bool, own: Any, found: Any, what: str) -> None:
    if not fits:
        raise SaveError(f"{what} is damaged: it is {_kind(found)}, not {_kind(own)}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"
