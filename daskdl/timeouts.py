"""How long daskdl waits, in one place.

Defaults come from Dask's configuration, namespace ``daskdl``, read where a run
is started (on the client) and sent along with it, because batch jobs do not
see the client's configuration::

    dask.config.set({"daskdl.timeouts.silence": "30s"})
    DASK_DASKDL__TIMEOUTS__SILENCE=30s
"""

from dataclasses import Field, dataclass, fields

import dask.config
from dask.utils import parse_timedelta

from daskdl.errors import OptionError


@dataclass(frozen=True)
class Timeouts:
    """Bounds on waiting, seconds.

    Attributes:
        join: For every replica of a run to start on its worker.
        request: For one request to be answered.
        silence: How long a replica or its worker may say nothing at all.
        stop: For replicas to leave once they were told to stop.
        rejoin: For more replicas to come, once there are fewer than `min_replicas`.
        data: For a piece of data to be computed and moved to where it is used.
    """

    join: float = 60.0
    request: float = 30.0
    silence: float = 60.0
    stop: float = 10.0
    rejoin: float = 300.0
    data: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise OptionError(
                    f"daskdl.timeouts.{field.name} must be > 0 s, got {value!r}"
                )

    @classmethod
    def from_config(cls) -> "Timeouts":
        """The configured time-outs; a number is seconds, text as ``"30s"``.

        Raises:
            OptionError: If one is not understood, or not > 0.
        """
        return cls(**{field.name: _seconds(field) for field in fields(cls)})


def _seconds(field: Field[float]) -> float:
    name = f"daskdl.timeouts.{field.name}"
    value = dask.config.get(name, field.default)
    try:
        return float(parse_timedelta(value, default="s"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OptionError(
            f"{name} must be seconds or text as '30s', got {value!r}"
        ) from error
