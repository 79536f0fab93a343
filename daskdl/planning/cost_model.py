"""Predicts the speed of several workers from the costs of a step of one replica.

Exchanges, requests, the link and shared cores add up to the length of a step. Pure
functions: nothing is measured or sent.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from daskdl.channel import routing, scheduler
from daskdl.channel.protocol import WIRE_BYTES
from daskdl.config import is_number
from daskdl.errors import OptionError
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import OUTBOX_BYTES
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.pace import UNSENT_BYTES

UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
ROUNDS = 100  # most iterations of the length of a step and the requests in it
SETTLED = 1.00001  # growth that ends the iteration
MADE = 10**6  # steps made, for `ExchangePace.interval`: late in a fit
MEASURED_EVERY = 16  # steps between measured exchanges, if the master chooses them
GOOD = 0.9  # least efficiency at which nothing but "compute" is the limit


@dataclass(frozen=True)
class Network:
    """The network of a cluster with one worker on each machine.

    Args:
        bandwidth_bits_per_s: Bandwidth of each machine's link in each direction, also
            of the scheduler's; bits per second, > 0. `math.inf` is no limit.
        latency_s: One-way latency between machines, seconds, >= 0.

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
        rate, latency_s = self.bandwidth_bits_per_s, self.latency_s
        if not is_number(rate) or not rate > 0:
            raise OptionError(
                f"bandwidth_bits_per_s must be a number > 0, got {rate!r}"
            )
        if not is_number(latency_s) or not 0 <= latency_s < math.inf:
            raise OptionError(f"latency_s must be seconds >= 0, got {latency_s!r}")

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for which a number of bytes occupies a link."""
        return 8 * nbytes / self.bandwidth_bits_per_s

    def __str__(self) -> str:
        rate = self.bandwidth_bits_per_s
        size, unit = next((u for u in UNITS if rate >= u[0]), (1.0, "bit/s"))
        return f"{rate / size:g} {unit}, {1e3 * self.latency_s:g} ms one way"


# Processes of one machine: sending costs CPU time only.
HERE = Network(math.inf, 0.0)


@dataclass(frozen=True)
class Costs:
    """Mean costs of one replica, seconds; an update is all frames of an exchange.

    Attributes:
        rows: Rows of a step.
        parameters: Trainable parameters.
        threads: Threads of torch.
        gradients_s: Forward and backward pass.
        optimizer_s: Optimizer step.
        encode_s: Exchange: finding, encoding and committing an update.
        apply_s: Applying one update of another replica, in the training thread.
        decode_s: Decoding one update of another replica, on the event loop.
        request_s: One request, at either end, on the event loop.
        item_s: Each further update in a request, at either end, on the event loop.
        update_bytes: Bytes of an update.
        density: Entries sent / parameters.
        adaptive: Whether the optimizer is adaptive, as Adam is.
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
    adaptive: bool = False

    @property
    def step_s(self) -> float:
        """Seconds of a step without any exchange."""
        return self.gradients_s + self.optimizer_s


@dataclass(frozen=True)
class Measured:
    """Costs measured on this machine.

    Attributes:
        alone: Costs of one process.
        cores: Cores of this machine.
        together: Mean costs of several processes that measured at once, or None.
        processes: Number of processes in `together`; 1 without.
    """

    alone: Costs
    cores: int
    together: Costs | None = None
    processes: int = 1

    @property
    def most_at_once(self) -> int:
        """The number of processes that have cores for all their threads."""
        return max(1, self.cores // self.alone.threads)

    def here(self, workers: int) -> Costs:
        """Return the costs of each of several processes on this machine.

        They share memory and caches: times grow linearly with the number of processes,
        up to `most_at_once`, and are never below those measured.
        """
        if self.together is None:
            return self.alone
        others = min(workers, self.most_at_once) - 1
        times = {}
        for name, alone in vars(self.alone).items():
            if name.endswith("_s"):
                slower = getattr(self.together, name)
                time_s = alone + (slower - alone) * others / (self.processes - 1)
                times[name] = max(time_s, min(alone, slower))
        return dataclasses.replace(self.alone, **times)

    def scaled(self, **factors: float) -> "Measured":
        """Return the same with some costs multiplied."""

        def scale(costs: Costs) -> Costs:
            changed = {name: f * getattr(costs, name) for name, f in factors.items()}
            return dataclasses.replace(costs, **changed)

        together = None if self.together is None else scale(self.together)
        return dataclasses.replace(self, alone=scale(self.alone), together=together)


@dataclass(frozen=True)
class Prediction:
    """The speed of a number of workers while they train.

    Attributes:
        workers: Number of workers.
        efficiency: Speed / (workers * speed of one).
        samples_per_s: Rows per second of all workers together.
        step_s: Seconds of a step of each worker.
        limit: The main cause of lost efficiency: ``"encode"``, ``"apply"``,
            ``"messages"``, ``"link"``, ``"relay"``, ``"latency"``, or, on one machine,
            ``"cores"``; ``"compute"`` if less than a tenth is lost.
        carried: Share of the exchanges that link and relay carry; the updates of the
            other exchanges stay in the residual.
        compute_s: Part of `step_s`: gradients and optimizer.
        encode_s: Part of `step_s`: making updates.
        apply_s: Part of `step_s`: applying the updates of others.
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
        """Speed as a multiple of one worker's."""
        return self.workers * self.efficiency


class _Traffic(NamedTuple):
    """Costs of one step of all replicas, in seconds, except for `queue`."""

    messages_s: float  # on each worker's event loop
    relay_s: float  # on the scheduler's event loop
    link_s: float  # on the busiest link
    latency_s: float  # of an update that meets no other update in transit
    longest_s: float  # of one that just misses a request at each hop
    queue: float  # most updates of a replica that wait in transit


def predict(
    measured: Measured, master: GradientSharing, link: Network | None, workers: int
) -> Prediction:
    """Predict the speed of a number of workers, >= 1; `link` is as in `daskdl.plan`.

    Each replica applies one update of each other replica per exchange. Decoding and
    sending count as time of the step, although the event loop does them: both need
    Python's lock, and busy workers have no core to spare. Starts and ends of runs and
    epochs, loading data and workers of unequal speed are ignored.

    Source:
        Deeplearning4j's ``efficiency = step / (step + encode + decode * all workers +
        service)``, with exchanges that are rarer than steps, requests that gather what
        waits, and bounds by link and relay.
    """
    alone = measured.alone
    if workers == 1:
        rate, step_s = alone.rows / alone.step_s, alone.step_s
        return Prediction(1, 1.0, rate, step_s, "compute", 1.0, step_s)
    costs = alone if link is not None else measured.here(workers)
    exchange_s = costs.encode_s + (workers - 1) * costs.apply_s
    cost = exchange_s / costs.step_s
    every = master.pace(adaptive=costs.adaptive).steps_between(cost, MADE)
    unsent = UNSENT_BYTES if master.exchange_every == "auto" else OUTBOX_BYTES
    master = dataclasses.replace(master, exchange_every=every)
    encode_s, apply_s = costs.encode_s / every, (workers - 1) * costs.apply_s / every
    training_s = costs.step_s + encode_s + apply_s
    # A longer step has more requests, up to one for each update.
    traffic_in = functools.partial(
        _traffic, costs, master, unsent, link or HERE, workers
    )
    traffic = traffic_in(training_s)
    for _ in range(ROUNDS):
        before_s = traffic.messages_s
        step_s = training_s + before_s
        traffic = traffic_in(step_s)
        if traffic.messages_s <= SETTLED * before_s:
            break
    busy_s = training_s + traffic.messages_s
    bounds = [(busy_s, "compute"), *_bounds(master, traffic, busy_s)]
    if link is None:
        work_s = workers * (costs.threads * training_s + traffic.messages_s)
        bounds.append(((work_s + traffic.relay_s) / measured.cores, "cores"))
    step_s, waits_for = max(bounds)
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
    rate, wait_s = workers * costs.rows / step_s, step_s - busy_s
    return Prediction(
        *(workers, efficiency, rate, step_s, limit, carried),
        *(costs.step_s, encode_s, apply_s, traffic.messages_s, wait_s),
    )


def _traffic(
    costs: Costs,
    master: GradientSharing,
    unsent: float,
    link: Network,
    n: int,
    step_s: float,
) -> _Traffic:
    """Return the traffic of `n` replicas with steps of this length.

    At most `unsent` bytes of a replica's updates wait to be sent.
    """
    every, nbytes = master.pace().longest_after(MADE), costs.update_bytes + WIRE_BYTES
    exchange_s, latency_s = link.seconds(nbytes) / every, link.latency_s
    cycle_s = routing.PACE_S + 2 * latency_s  # between two requests of a worker
    decode_s = costs.decode_s * (n - 1) / every
    if master.routing_for(n) == "mesh":
        # In trees too, each replica sends one copy for each other replica.
        requests = 2 * (n - 1) * min(1.0, step_s / cycle_s)
        items = 2 * (n - 1) / every
        hops, reached, width = 0, 1, 1
        while reached < n:
            width *= master.fan_out
            reached += width
            hops += 1
        return _Traffic(
            costs.request_s * requests + costs.item_s * items + decode_s,
            0.0,
            (n - 1) * exchange_s,
            hops * latency_s + (hops - 1) * cycle_s,
            hops * (latency_s + cycle_s),
            max(1.0, unsent / nbytes),
        )
    down_s = scheduler.PACE_S + 2 * latency_s  # between two requests to a worker
    requests = min(1.0, step_s / cycle_s) + min(n - 1.0, step_s / down_s)
    handling_s = costs.request_s * requests + costs.item_s * n / every
    return _Traffic(
        handling_s + decode_s,
        n * handling_s,
        n * (n - 1) * exchange_s,
        # Of updates that arrive at the relay together, the first is sent at once.
        2 * latency_s + (down_s if n > 2 else 0.0),
        2 * latency_s + cycle_s + down_s,
        max(1.0, (unsent + RELAY_BYTES / (n - 1)) / nbytes),
    )


def _bounds(
    master: GradientSharing, traffic: _Traffic, busy_s: float
) -> list[tuple[float, str]]:
    """Return lower bounds of a step's length due to updates in transit."""
    staleness, every = master.staleness_bound(MADE), master.pace().longest_after(MADE)
    if staleness is None:  # nobody waits; exchanges are deferred
        return []
    carrying = [(traffic.link_s, "link"), (traffic.relay_s, "relay")]
    travel_s = traffic.latency_s if staleness == 0 else traffic.longest_s
    parts = [(travel_s / every, "latency"), *carrying]
    total_s, name = sum(seconds for seconds, _ in parts), max(parts)[1]
    if staleness == 0:  # one after the other, once for each exchange
        return [(busy_s + total_s, name)]
    # A replica that is too far ahead waits for an update in transit: one without delay,
    # or the last of a full queue. A queue of few large updates delays nobody, as more
    # of them are deferred.
    age = min(1.0, traffic.queue * every / staleness)
    return [
        (every * total_s / staleness, name),
        *((age * seconds, cause) for seconds, cause in carrying),
    ]
