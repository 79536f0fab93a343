"""The version, the timeouts in Dask's configuration, and checks of plain options.

The defaults are in ``daskdl.yaml``, beside this file. Importing daskdl adds them to
Dask's configuration, where the user's settings take precedence. The client reads the
values when a run starts and sends them to the workers::

    dask.config.set({"daskdl.timeouts.silence": "30s"})
    DASK_DASKDL__TIMEOUTS__SILENCE=30s
"""

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import dask.config
from dask.utils import parse_timedelta

from daskdl.errors import OptionError

VERSION = "0.1.0"

FILE = Path(__file__).with_name("daskdl.yaml")
(DEFAULTS,) = dask.config.collect_yaml([str(FILE)])


class Bound(NamedTuple):
    """The longest time for one wait, and the options that set it."""

    seconds: float  # sum of the named timeouts
    names: tuple[str, ...]  # timeouts in `daskdl.timeouts`

    def __str__(self) -> str:
        """Return the bound as text for messages."""
        return f"{self.seconds:g} s (daskdl.timeouts.{' + '.join(self.names)})"


@dataclass(frozen=True)
class Timeouts:
    """Bounds on waiting, seconds; the defaults are in ``daskdl.yaml``.

    Attributes:
        join: Start of every replica of a run on its worker.
        request: Response to one request.
        silence: Longest time without a heartbeat of a replica or its worker.
        stop: Departure of the replicas after a stop.
        rejoin: Arrival of replicas while there are fewer than `min_replicas`, or none.
        data: Computation and transfer of one part of the data.
    """

    join: float
    request: float
    silence: float
    stop: float
    rejoin: float
    data: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise OptionError(
                    f"daskdl.timeouts.{field.name} must be > 0 s, got {value!r}"
                )

    def bound(self, *names: str) -> Bound:
        """Return the sum of some timeouts, for a wait and its message.

        Example:
            >>> timeouts = Timeouts(1, 2, 3, 4, 5, 6)
            >>> print(timeouts.bound("join", "request"))
            3 s (daskdl.timeouts.join + request)
        """
        return Bound(sum(getattr(self, name) for name in names), names)

    @classmethod
    def from_config(cls) -> "Timeouts":
        """Return the configured timeouts: numbers of seconds, or text like "30s".

        Raises:
            OptionError: If a timeout is not allowed, or if Dask's configuration has any
                key of daskdl that does not exist.
        """
        check_names()
        return cls(**{field.name: _seconds(field.name) for field in fields(cls)})


def _seconds(name: str) -> float:
    # A user who sets the whole namespace may have left out some timeouts.
    value = dask.config.get(
        f"daskdl.timeouts.{name}", DEFAULTS["daskdl"]["timeouts"][name]
    )
    try:
        return float(parse_timedelta(value, default="s"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OptionError(
            f"daskdl.timeouts.{name} must be seconds or text like '30s', got {value!r}"
        ) from error


def check_names() -> None:
    """Refuse names below ``daskdl`` in Dask's configuration that do not exist.

    Example:
        >>> with dask.config.set({"daskdl.silence": "30s"}):
        ...     check_names()
        Traceback (most recent call last):
        daskdl.errors.OptionError: daskdl.silence does not exist in Dask's \
configuration: did you mean daskdl.timeouts.silence?
    """
    wrong = []
    for root, value in dask.config.config.items():
        name = _spelled(root)
        if name == "daskdl":
            wrong += _wrong_below(name, value)
        elif name.startswith("daskdl_"):
            wrong.append(_nonexistent(name))
    if wrong:
        raise OptionError("; ".join(wrong))


KNOWN = [
    f"daskdl.{part}.{name}" for part, s in DEFAULTS["daskdl"].items() for name in s
]


def _spelled(name: object) -> str:
    return str(name).replace("-", "_")  # Dask reads both alike


def _wrong_below(name: str, value: Any) -> list[str]:
    """Return what is wrong with a name, and with the names below it."""
    if name in KNOWN:
        return []
    exists = any(key.startswith(f"{name}.") for key in KNOWN)
    if isinstance(value, Mapping) and (exists or value):
        below = [(f"{name}.{_spelled(key)}", v) for key, v in value.items()]
        return [what for key, v in below for what in _wrong_below(key, v)]
    if exists and value is not None:
        there = [key.removeprefix(f"{name}.") for key in KNOWN if key.startswith(name)]
        return [f"{name} must be a mapping with {', '.join(there)}, got {value!r}"]
    return [] if exists else [_nonexistent(name)]


def _nonexistent(name: str) -> str:
    """Return a message about a name that does not exist, with the nearest one."""
    is_root = "." not in name
    alike = {k.replace(".", "_") if is_root else k.rpartition(".")[2]: k for k in KNOWN}
    close = difflib.get_close_matches(name.rpartition(".")[2], alike, 1)
    nearest = alike[close[0]] if close else ""
    remedy = f"did you mean {nearest}?" if nearest else f"there are {', '.join(KNOWN)}"
    if is_root and nearest:
        variable = f"DASK_{nearest.replace('.', '__').upper()}"
        remedy += f" In the environment: {variable}"
    return f"{name} does not exist in Dask's configuration: {remedy}"


# Copies the defaults to ~/.config/dask, commented out, as Dask's own libraries do.
dask.config.ensure_file(source=str(FILE))
dask.config.update_defaults(DEFAULTS)


def check_type(name: str, value: object, wanted: type) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, wanted):
        kind = f"{wanted.__module__}.{wanted.__qualname__}"
        remedy = instead_of_class(value)
        raise OptionError(f"{name} must be a {kind}, got {value!r}{remedy}")


def instead_of_class(value: object) -> str:
    """Return the end of a message that got a class where an instance is needed."""
    if not isinstance(value, type):
        return ""
    return f"; create one, {value.__name__}()"


def check_whole(name: str, value: Any, least: int, *others: str | None) -> None:
    """Refuse a value that is neither an integer >= `least` nor one of `others`.

    Example:
        >>> check_whole("patience", 0, 1, None)
        Traceback (most recent call last):
        daskdl.errors.OptionError: patience must be a whole number >= 1 or None, got 0
    """
    if isinstance(value, str | None) and value in others:
        return
    if not is_whole(value) or value < least:
        allowed = " or ".join([f"a whole number >= {least}", *map(repr, others)])
        raise OptionError(f"{name} must be {allowed}, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Refuse a value that is not an integer >= 1, of Python or numpy.

    Example:
        >>> check_count("batch_size", 0)
        Traceback (most recent call last):
        daskdl.errors.OptionError: batch_size must be a whole number >= 1, got 0
    """
    check_whole(name, int(value) if is_integral(value) else value, 1)


def check_flag(name: str, value: Any) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse a value that is not among the allowed strings.

    Example:
        >>> check_choice("mode", "most", ("min", "max", "auto"))
        Traceback (most recent call last):
        daskdl.errors.OptionError: mode must be one of 'min', 'max', 'auto', got 'most'
    """
    if value not in allowed:
        words = [*map(repr, allowed)]
        choices = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
        raise OptionError(f"{name} must be {choices}, got {value!r}")


def check_bound(name: str, value: Any) -> None:
    """Refuse a value that is neither None nor a finite number of seconds > 0."""
    if value is None:
        return
    if not is_number(value) or not 0 < value < math.inf:
        raise OptionError(f"{name} must be seconds > 0 or None, got {value!r}")


def is_whole(value: Any) -> bool:
    """Whether a value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_integral(value: Any) -> bool:
    """Whether a value is an integer, of Python or numpy, but not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
