"""What the messages of a run cost while each replica makes one step. No I/O.

Every replica's update goes to every other one. Requests to one destination follow each
other: the next one goes when the answer is there and a pause is over, and takes along
all that has gathered. So the longer a step, the more requests there are to it, up to
one for each message.
"""

from dataclasses import dataclass
from typing import NamedTuple

from daskdl.channel import routing, scheduler
from daskdl.channel.protocol import WIRE_BYTES
from daskdl.planning.costs import Costs
from daskdl.planning.network import Network
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import OUTBOX_BYTES
from daskdl.training.gradient_sharing import GradientSharing


class Traffic(NamedTuple):
    """Of one step of all replicas; seconds, but for the last."""

    messages_s: float  # each worker's event loop has to do
    relay_s: float  # the scheduler's event loop has to do
    link_s: float  # the busiest link is busy
    way_s: float  # an update is under way, if all come at once and nothing else is
    longest_way_s: float  # the same, if it just misses a request at each hop
    queue: float  # updates of each replica that may wait on their way


@dataclass(frozen=True)
class Crowd:
    """So many replicas that exchange updates.

    Attributes:
        costs: Of each.
        master: How they do it.
        link: Between them.
        workers: How many there are, >= 2.
    """

    costs: Costs
    master: GradientSharing
    link: Network
    workers: int

    def traffic(self, step_s: float) -> Traffic:
        """What there is to do for steps of so many seconds."""
        if self.master.routing_for(self.workers) == "mesh":
            return self._direct(step_s)
        return self._relayed(step_s)

    def _relayed(self, step_s: float) -> Traffic:
        costs, n, every = self.costs, self.workers, self.master.exchange_every
        up, down = self._cycle_s(routing.PACE_S), self._cycle_s(scheduler.PACE_S)
        requests = min(1.0, step_s / up) + min(n - 1.0, step_s / down)
        handling = costs.request_s * requests + costs.item_s * n / every
        busy_s = self.link.seconds(n * (n - 1) * self._nbytes / every)
        latency_s = self.link.latency_s
        # Of updates that come to the relay together, the first goes at once.
        gathering_s = down if n > 2 else 0.0
        return Traffic(
            handling + costs.decode_s * (n - 1) / every,
            n * handling,
            busy_s,
            2 * latency_s + gathering_s,
            2 * latency_s + up + down,
            self._fitting(OUTBOX_BYTES + RELAY_BYTES / (n - 1)),
        )

    def _direct(self, step_s: float) -> Traffic:
        # In trees too everybody sends, in all, as many copies as there are others.
        costs, n, every = self.costs, self.workers, self.master.exchange_every
        cycle_s = self._cycle_s(routing.PACE_S)
        requests = 2 * (n - 1) * min(1.0, step_s / cycle_s)
        items = 2 * (n - 1) / every
        hops, latency_s = self._hops(), self.link.latency_s
        return Traffic(
            costs.request_s * requests
            + costs.item_s * items
            + costs.decode_s * (n - 1) / every,
            0.0,
            self.link.seconds((n - 1) * self._nbytes / every),
            hops * latency_s + (hops - 1) * cycle_s,
            hops * (latency_s + cycle_s),
            self._fitting(OUTBOX_BYTES),
        )

    def _cycle_s(self, pace_s: float) -> float:
        return pace_s + 2 * self.link.latency_s

    @property
    def _nbytes(self) -> float:
        return self.costs.update_bytes + WIRE_BYTES

    def _fitting(self, nbytes: float) -> float:
        return max(1.0, nbytes / self._nbytes)

    def _hops(self) -> int:
        """Of a tree in which each passes on to `fan_out` others."""
        hops, reached, width = 0, 1, 1
        while reached < self.workers:
            width *= self.master.fan_out
            reached += width
            hops += 1
        return hops
