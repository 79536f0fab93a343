"""How long daskdl waits, in one place.

The defaults are in ``daskdl.yaml``, beside this file, and are added to Dask's
configuration, namespace ``daskdl``, when daskdl is imported: what the user has set
there comes first. It is read where a run is started (on the client) and sent along
with it, because batch jobs do not see the client's configuration::

    dask.config.set({"daskdl.timeouts.silence": "30s"})
    DASK_DASKDL__TIMEOUTS__SILENCE=30s
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import dask.config
from dask.utils import parse_timedelta

from daskdl.errors import OptionError

FILE = Path(__file__).with_name("daskdl.yaml")
(DEFAULTS,) = dask.config.collect_yaml([str(FILE)])


class Bound(NamedTuple):
    """How long one wait may take, and what to set if that is too short."""

    seconds: float
    names: tuple[str, ...]  # of time-outs; their sum

    def __str__(self) -> str:
        """As messages have it."""
        first, *others = self.names
        return (
            f"{self.seconds:g} s ({' + '.join([f'daskdl.timeouts.{first}', *others])})"
        )


@dataclass(frozen=True)
class Timeouts:
    """Bounds on waiting, seconds; the defaults are in ``daskdl.yaml``.

    Attributes:
        join: For every replica of a run to start on its worker.
        request: For one request to be answered.
        silence: How long a replica or its worker may say nothing at all.
        stop: For replicas to leave once they were told to stop.
        rejoin: For more replicas to come, once there are fewer than `min_replicas`.
        data: For a piece of data to be computed and moved to where it is used.
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
        """The sum of some time-outs, for a wait and its message.

        Example:
            >>> timeouts = Timeouts(1, 2, 3, 4, 5, 6)
            >>> print(timeouts.bound("join", "request"))
            3 s (daskdl.timeouts.join + request)
        """
        return Bound(sum(getattr(self, name) for name in names), names)

    @classmethod
    def from_config(cls) -> "Timeouts":
        """The configured time-outs; a number is seconds, text as ``"30s"``.

        Raises:
            OptionError: If one is not understood, not > 0, or does not exist.
        """
        known = [field.name for field in fields(cls)]
        configured: Any = dask.config.get("daskdl.timeouts", None)
        for name in configured if isinstance(configured, dict) else ():
            if name not in known:
                raise OptionError(
                    f"daskdl.timeouts.{name} does not exist; there are "
                    f"{', '.join(known)}"
                )
        return cls(**{name: _seconds(name) for name in known})


def _seconds(name: str) -> float:
    # Who sets the namespace as a whole may have left some of it out.
    value = dask.config.get(
        f"daskdl.timeouts.{name}", DEFAULTS["daskdl"]["timeouts"][name]
    )
    try:
        return float(parse_timedelta(value, default="s"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OptionError(
            f"daskdl.timeouts.{name} must be seconds or text as '30s', got {value!r}"
        ) from error


# As Dask's own libraries do: the user finds them in ~/.config/dask, commented out.
dask.config.ensure_file(source=str(FILE))
dask.config.update_defaults(DEFAULTS)
