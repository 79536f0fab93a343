"""What joins the machines of a cluster.

What a step and an exchange cost one replica, as numbers. Nothing is measured.

What the messages of a run cost while each replica makes one step. No I/O.

Every replica's update goes to every other one. Requests to one destination follow each
other: the next one goes when the answer is there and a pause is over, and takes along
all that has gathered. So the longer a step, the more requests there are to it, up to
one for each message.

From costs to the speed of so many workers. Pure: nothing is measured or sent.

Deeplearning4j's form has ``efficiency = step / (step + encode + decode * all workers +
service)``. What is different here, and so in this model:

- A replica applies one update of each *other* replica for each exchange, and with
  `exchange_every` exchanges are rarer than steps.
- Decoding, and all that is sent, is work of an event loop beside the training thread.
  It is counted as time of the step all the same: both need Python's lock, and a worker
  whose threads all compute has no core to spare.
- One request carries what has gathered, so their number depends on the step's length.
- The link and the relay bound how many exchanges there can be. A replica that may run
  ahead (`max_staleness`) does not wait for a message under way; in step it does.

Not in it: the start and the end of a run and of its epochs, data that have to be
fetched, and workers of unequal speed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from daskdl.channel import routing, scheduler
from daskdl.channel.protocol import WIRE_BYTES
from daskdl.config import is_number
from daskdl.errors import OptionError
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import OUTBOX_BYTES
from daskdl.training.gradient_sharing import GradientSharing

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


ROUNDS = 100  # of lengthening a step by the requests that fit into it, at most
SETTLED = 1.00001  # growth in one of these rounds that is none
GOOD = 0.9  # an efficiency that is not worth a remark


@dataclass(frozen=True)
class Prediction:
    """So many workers, once they are at work.

    Attributes:
        workers: How many there are.
        efficiency: Speed / (workers * speed of one).
        samples_per_s: Of all workers together.
        step_s: Seconds for a step of each.
        limit: What takes most of what efficiency lacks: ``"encode"``, ``"apply"``,
            ``"messages"``, ``"link"``, ``"relay"``, ``"latency"``, or ``"cores"``, on
            one machine; ``"compute"`` where it lacks less than a tenth.
        carried: Share of the exchanges that link and relay carry; the rest is put off.
        compute_s: Part of `step_s`: gradients and optimizer.
        encode_s: Part of `step_s`: making updates.
        apply_s: Part of `step_s`: applying those of others.
        messages_s: Part of `step_s`: sending, receiving, decoding.
        wait_s: Part of `step_s`: waiting.
    """

    workers: int
    efficiency: float
    samples_per_s: float
    step_s: float
    limit: str
    carried: float
    compute_s: float
    encode_s: float = 0.0
    apply_s: float = 0.0
    messages_s: float = 0.0
    wait_s: float = 0.0

    @property
    def speed(self) -> float:
        """As a multiple of one worker's."""
        return self.workers * self.efficiency


class _Bound(NamedTuple):
    """A step takes so long at least."""

    step_s: float
    name: str


def predict(
    measured: Measured, master: GradientSharing, link: Network | None, workers: int
) -> Prediction:
    """Predict the speed of so many workers.

    Args:
        measured: What a step and an exchange cost.
        master: How updates are shared.
        link: Between the machines, one for each worker; None: all workers and the
            scheduler are processes of the machine where the costs were measured.
        workers: >= 1.
    """
    alone = measured.alone
    if workers == 1:
        rate, step_s = alone.rows / alone.step_s, alone.step_s
        return Prediction(1, 1.0, rate, step_s, "compute", 1.0, step_s)
    costs = alone if link is not None else measured.here(workers)
    crowd = Crowd(costs, master, HERE if link is None else link, workers)
    every = master.exchange_every
    encode_s, apply_s = costs.encode_s / every, (workers - 1) * costs.apply_s / every
    training_s = costs.step_s + encode_s + apply_s
    traffic = _settled(crowd, training_s)
    busy_s = training_s + traffic.messages_s
    bounds = _bounds(crowd, traffic, busy_s)
    if link is None:
        work_s = workers * (costs.threads * training_s + traffic.messages_s)
        bounds.append(_Bound((work_s + traffic.relay_s) / measured.cores, "cores"))
    step_s, waits_for = max([*bounds, _Bound(busy_s, "compute")])
    carried = min(1.0, step_s / max(traffic.link_s, traffic.relay_s, step_s))
    efficiency = alone.step_s / step_s
    lacks = {
        "encode": encode_s,
        "apply": apply_s,
        "messages": traffic.messages_s,
        "cores": costs.step_s - alone.step_s,
    }
    lacks[waits_for] = lacks.get(waits_for, 0.0) + step_s - busy_s
    limit = max(lacks, key=lambda name: lacks[name])
    if carried < 1:
        limit = "link" if traffic.link_s >= traffic.relay_s else "relay"
    elif efficiency >= GOOD:
        limit = "compute"
    return Prediction(
        workers,
        efficiency,
        workers * costs.rows / step_s,
        step_s,
        limit,
        carried,
        costs.step_s,
        encode_s,
        apply_s,
        traffic.messages_s,
        step_s - busy_s,
    )


def _settled(crowd: Crowd, training_s: float) -> Traffic:
    """The traffic of steps that are as long as it makes them."""
    traffic = crowd.traffic(training_s)
    for _ in range(ROUNDS):
        before_s = traffic.messages_s
        traffic = crowd.traffic(training_s + before_s)
        if traffic.messages_s <= SETTLED * before_s:
            break
    return traffic


def _bounds(crowd: Crowd, traffic: Traffic, busy_s: float) -> list[_Bound]:
    """What else a step cannot be shorter than, because of what is under way."""
    staleness, every = crowd.master.max_staleness, crowd.master.exchange_every
    if staleness is None:  # nobody waits; what is not carried is put off
        return []
    carrying = [_Bound(traffic.link_s, "link"), _Bound(traffic.relay_s, "relay")]
    if staleness == 0:  # one after the other, once for each exchange
        parts = [_Bound(traffic.way_s / every, "latency"), *carrying]
        return [_Bound(busy_s + sum(p.step_s for p in parts), max(parts).name)]
    # Who is too far ahead of what it has heard of the slowest waits for what is under
    # way: for one that is not held up, or for the last of a full queue. A queue of few
    # large updates holds nobody up, as more of them are put off.
    parts = [
        _Bound(traffic.longest_way_s / every, "latency"),
        *carrying,
    ]
    under_way_s = every * sum(part.step_s for part in parts)
    age = min(1.0, traffic.queue * every / staleness)
    return [
        _Bound(under_way_s / staleness, max(parts).name),
        *(_Bound(age * part.step_s, part.name) for part in carrying),
    ]


def predictions(
    measured: Measured,
    master: GradientSharing,
    link: Network | None,
    workers: tuple[int, ...],
) -> tuple[Prediction, ...]:
    """One for each number of workers."""
    return tuple(predict(measured, master, link, count) for count in workers)
