"""What joins the machines of a cluster."""

import math
from dataclasses import dataclass

from daskdl.config import is_number
from daskdl.errors import OptionError

_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


@dataclass(frozen=True)
class Network:
    """The network of a cluster with one worker on each machine.

    Args:
        bandwidth_bits_per_s: Of each machine's link, the scheduler's too, and of each
            direction by itself; bits per second, > 0. `math.inf` is no limit.
        latency_s: From one machine to another, one way, seconds, >= 0.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> network = Network(bandwidth_bits_per_s=1e9, latency_s=0.001)
        >>> print(network)
        1 Gbit/s, 1 ms one way
        >>> network.seconds(125_000)
        0.001
    """

    bandwidth_bits_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not is_number(self.bandwidth_bits_per_s) or not (
            self.bandwidth_bits_per_s > 0
        ):
            raise OptionError(
                "bandwidth_bits_per_s must be a number > 0, got "
                f"{self.bandwidth_bits_per_s!r}"
            )
        if not is_number(self.latency_s) or not 0 <= self.latency_s < math.inf:
            raise OptionError(f"latency_s must be seconds >= 0, got {self.latency_s!r}")

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes keep a link busy."""
        return 8 * nbytes / self.bandwidth_bits_per_s

    def __str__(self) -> str:
        rate = self.bandwidth_bits_per_s
        size, unit = next((u for u in _UNITS if rate >= u[0]), (1.0, "bit/s"))
        return f"{rate / size:g} {unit}, {1e3 * self.latency_s:g} ms one way"


# Processes of one machine: memory is no limit, and what it costs is CPU time.
HERE = Network(math.inf, 0.0)
