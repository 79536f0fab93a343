"""Predicts the speed of several workers from the costs of a step of one replica.

The step time follows from exchanges, requests, the link and shared cores. These are
pure functions, which neither measure nor send anything.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from daskdl.channel import routing, scheduler
from daskdl.channel.leasing import RunSpec
from daskdl.channel.merging import TREE_BYTES
from daskdl.channel.protocol import UNSENT_BYTES, WIRE_BYTES
from daskdl.config import is_number
from daskdl.errors import OptionError
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import OUTBOX_BYTES
from daskdl.training.gradient_sharing import GradientSharing

UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
MAX_ITERATIONS = 100  # of the step time and the requests in a step
CONVERGED = 1.00001  # growth that ends the iteration
STEPS_BEFORE = 10**6  # so many that the exchange interval no longer grows
MEASURED_EVERY = 16  # steps between measured exchanges, if the master chooses them
# Size of the sum of many updates, bytes per parameter: that of 32 updates, and what it
# grows by as their number doubles (benchmarks/emulation.py).
SUM_BYTES, SUM_GROWTH_BYTES = 0.65, 0.15
MANY_SUMMED = 32
# Entries of an update that is summed, whose quanta are rounded down to powers of two,
# for each entry of one that is not (benchmarks/emulation.py, `kilobytes`).
SUMMED_ENTRIES = 1.4
HIGH_EFFICIENCY = 0.9  # least efficiency at which "compute" is the limit


@dataclass(frozen=True)
class Network:
    """The network of a cluster with one worker on each machine.

    Args:
        bandwidth_bits_per_s: Bandwidth of each machine's link, including the
            scheduler's, in each direction; bits per second, > 0. `math.inf`: no limit.
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
        """Return how long the transfer of a number of bytes takes, without latency."""
        return 8 * nbytes / self.bandwidth_bits_per_s

    def __str__(self) -> str:
        rate = self.bandwidth_bits_per_s
        size, unit = next((u for u in UNITS if rate >= u[0]), (1.0, "bit/s"))
        return f"{rate / size:g} {unit}, {1e3 * self.latency_s:g} ms one way"


# Between processes on one machine, sending costs CPU time only.
HERE = Network(math.inf, 0.0)


@dataclass(frozen=True)
class Costs:
    """Mean costs of one replica; an update consists of all frames of an exchange.

    Attributes:
        rows: Number of rows in a step.
        parameters: Number of trainable parameters.
        threads: Number of torch threads.
        gradients_s: Forward and backward pass of a step, seconds.
        optimizer_s: Optimizer step, seconds.
        overhead_s: Work of the exchange in each step, even if none is due, seconds.
        encode_s: Finding, encoding and committing an update, seconds.
        apply_s: Applying one update of another replica in the training thread, seconds.
        dense_s: Applying the sum of many updates in the training thread, seconds.
        decode_s: Decoding one update of another replica on the event loop, seconds.
        request_s: One request on the event loop, at either end, seconds.
        item_s: Each further update in a request, at either end, seconds.
        update_bytes: Size of an update, bytes.
        density: Entries sent / parameters.
        adaptive: Whether the optimizer is adaptive, as Adam is.
    """

    rows: int
    parameters: int
    threads: int
    gradients_s: float
    optimizer_s: float
    overhead_s: float
    encode_s: float
    apply_s: float
    dense_s: float
    decode_s: float
    request_s: float
    item_s: float
    update_bytes: float
    density: float
    adaptive: bool = False

    @property
    def step_s(self) -> float:
        """Time of a step without an exchange, seconds."""
        return self.gradients_s + self.optimizer_s

    def apply_others_s(self, peers: int, master: GradientSharing) -> float:
        """Return the time to apply an update of each other replica, seconds."""
        separate_s = peers * self.apply_s
        merges = master.routing == "merged"
        return min(separate_s, self.dense_s) if merges else separate_s

    def sum_bytes(self, replicas: int) -> float:
        """Return the size of the sum of an update of each replica, bytes."""
        doublings = math.log2(max(1.0, replicas / MANY_SUMMED))
        dense = (SUM_BYTES + SUM_GROWTH_BYTES * doublings) * self.parameters
        return min(replicas * self.summed_bytes, dense)

    @property
    def summed_bytes(self) -> float:
        """Size of an update that is summed, bytes."""
        return SUMMED_ENTRIES * self.update_bytes


@dataclass(frozen=True)
class Measured:
    """Costs measured on this machine.

    Attributes:
        alone: Costs of one process.
        cores: Number of cores of this machine.
        together: Mean costs of several processes that measured at the same time, or
            None.
        processes: Number of processes in `together`, or 1.
    """

    alone: Costs
    cores: int
    together: Costs | None = None
    processes: int = 1

    @property
    def most_at_once(self) -> int:
        """Number of processes that can run with a core for each thread, >= 1."""
        return max(1, self.cores // self.alone.threads)

    def here(self, workers: int) -> Costs:
        """Return the costs of each of several processes on this machine.

        Processes share memory and caches, so times grow linearly with the number of
        processes, up to `most_at_once`; no time is below the measured ones.
        """
        if self.together is None:
            return self.alone
        others = min(workers, self.most_at_once) - 1
        times = {}
        for name, alone_s in vars(self.alone).items():
            if name.endswith("_s"):
                together_s = getattr(self.together, name)
                growth_s = (together_s - alone_s) / (self.processes - 1)
                times[name] = max(alone_s + growth_s * others, min(alone_s, together_s))
        return dataclasses.replace(self.alone, **times)

    def scaled(self, **factors: float) -> "Measured":
        """Return a copy with some costs multiplied."""

        def scale(costs: Costs) -> Costs:
            scaled = {
                name: factor * getattr(costs, name) for name, factor in factors.items()
            }
            return dataclasses.replace(costs, **scaled)

        together = None if self.together is None else scale(self.together)
        return dataclasses.replace(self, alone=scale(self.alone), together=together)


@dataclass(frozen=True)
class Prediction:
    """The speed of a number of workers while they train.

    Attributes:
        workers: Number of workers.
        efficiency: Speed / (workers * speed of one worker).
        samples_per_s: Rows per second of all workers together.
        step_s: Time of a step of each worker, seconds; the sum of the five times below.
        limit: The main cause of lost efficiency: ``"encode"``, ``"apply"``,
            ``"messages"``, ``"link"``, ``"relay"``, ``"latency"``, or, on one machine,
            ``"cores"``; ``"compute"`` if less than a tenth is lost.
        carried: Share of the exchanges that link and relay carry; the updates of the
            other exchanges stay in the residual.
        compute_s: Gradients and optimizer step.
        encode_s: Keeping track of the parameters and creating updates.
        apply_s: Applying the updates of other replicas.
        messages_s: Sending, receiving and decoding updates.
        wait_s: Waiting.
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
    """Messages of one step of all replicas."""

    messages_s: float  # time of each worker's event loop
    relay_s: float  # time of the scheduler's event loop
    link_s: float  # time of the busiest link
    latency_s: float  # of an update that meets no other update in transit
    longest_s: float  # of an update that just misses a request at each hop
    queue: float  # most updates of one replica in transit


def predict(
    measured: Measured, master: GradientSharing, link: Network | None, workers: int
) -> Prediction:
    """Predict the speed of a number of workers, >= 1; for `link` see `daskdl.plan`.

    In each exchange, a replica applies one update of each other replica, or the sum of
    all if they are merged. The step time includes decoding and sending, although the
    event loop does both: they hold the GIL, and busy workers have no free core.
    Predictions ignore the start and the end of runs and epochs, the loading of data,
    and differences in speed between workers.

    Source:
        Deeplearning4j's ``efficiency = step / (step + encode + decode * all workers +
        service)``, extended by exchanges that are rarer than steps, requests with
        several updates, and bounds due to link and relay.
    """
    alone = measured.alone
    if workers == 1:
        return Prediction(
            workers=1,
            efficiency=1.0,
            samples_per_s=alone.rows / alone.step_s,
            step_s=alone.step_s,
            limit="compute",
            carried=1.0,
            compute_s=alone.step_s,
        )
    costs = alone if link is not None else measured.here(workers)
    master = dataclasses.replace(master, routing=master.routing_for(workers))
    apply_others_s = costs.apply_others_s(workers - 1, master)
    exchange_s = costs.encode_s + apply_others_s
    pace = master.pace(adaptive=costs.adaptive)
    every = pace.steps_between(exchange_s / costs.step_s, STEPS_BEFORE)
    unsent = UNSENT_BYTES if master.exchange_every == "auto" else OUTBOX_BYTES
    master = dataclasses.replace(
        master,
        exchange_every=every,
        max_staleness=master.staleness_bound(
            STEPS_BEFORE, every if costs.adaptive else 0
        ),
    )
    encode_s = costs.overhead_s + costs.encode_s / every
    apply_s = apply_others_s / every
    training_s = costs.step_s + encode_s + apply_s
    traffic_in = functools.partial(
        _traffic, costs, master, unsent, link or HERE, workers
    )
    traffic = traffic_in(training_s)
    # A longer step has more requests, up to one for each update.
    for _ in range(MAX_ITERATIONS):
        previous_s = traffic.messages_s
        traffic = traffic_in(training_s + previous_s)
        if traffic.messages_s <= CONVERGED * previous_s:
            break
    busy_s = training_s + traffic.messages_s
    bounds = [(busy_s, "compute"), *_bounds(master, traffic, busy_s)]
    if link is None:
        work_s = workers * (costs.threads * training_s + traffic.messages_s)
        bounds.append(((work_s + traffic.relay_s) / measured.cores, "cores"))
    step_s, bottleneck = max(bounds)
    carried = min(1.0, step_s / max(traffic.link_s, traffic.relay_s, step_s))
    efficiency = alone.step_s / step_s
    losses_s = {
        "encode": encode_s,
        "apply": apply_s,
        "messages": traffic.messages_s,
        "cores": costs.step_s - alone.step_s,
    }
    losses_s[bottleneck] = losses_s.get(bottleneck, 0.0) + step_s - busy_s
    limit = max(losses_s, key=lambda cause: losses_s[cause])
    if carried < 1:
        limit = "link" if traffic.link_s >= traffic.relay_s else "relay"
    elif efficiency >= HIGH_EFFICIENCY:
        limit = "compute"
    return Prediction(
        workers=workers,
        efficiency=efficiency,
        samples_per_s=workers * costs.rows / step_s,
        step_s=step_s,
        limit=limit,
        carried=carried,
        compute_s=costs.step_s,
        encode_s=encode_s,
        apply_s=apply_s,
        messages_s=traffic.messages_s,
        wait_s=step_s - busy_s,
    )


def _traffic(
    costs: Costs,
    master: GradientSharing,
    unsent: float,
    link: Network,
    replicas: int,
    step_s: float,
) -> _Traffic:
    """Return the traffic of several replicas whose steps take `step_s`.

    At most `unsent` bytes of a replica's updates wait to be sent.
    """
    peers = replicas - 1
    every = master.pace().longest_after(STEPS_BEFORE)
    nbytes = costs.update_bytes + WIRE_BYTES
    exchange_s, latency_s = link.seconds(nbytes) / every, link.latency_s
    cycle_s = routing.PACE_S + 2 * latency_s  # between two requests of a worker
    decode_s = costs.decode_s * peers / every
    interval = range(STEPS_BEFORE, STEPS_BEFORE + every)
    announced = sum(map(master.announces, interval)) / every  # of the steps
    if master.routing == "mesh":
        # In trees too, each replica sends one copy for each other replica. It announces
        # its progress together with its updates, so most requests carry both.
        requests = 2 * peers * min(announced, step_s / cycle_s)
        hops = _hops(replicas - 1, master.fan_out)
        return _Traffic(
            messages_s=_handling_s(costs, requests, 2 * peers / every) + decode_s,
            relay_s=0.0,
            link_s=peers * exchange_s,
            latency_s=hops * latency_s + (hops - 1) * cycle_s,
            longest_s=hops * (latency_s + cycle_s),
            queue=max(1.0, unsent / nbytes),
        )
    down_s = scheduler.PACE_S + 2 * latency_s  # between two requests to a worker
    # What is in the relay counts as unsent, up to the newest update and one on its way.
    in_relay = 2 * nbytes if unsent <= UNSENT_BYTES else RELAY_BYTES / peers
    if master.routing == "merged":
        requests = max(min(announced, step_s / cycle_s), step_s / routing.BEAT_S)
        requests += min(announced, step_s / down_s)
        handling_s = _handling_s(costs, requests, 2 / every)
        sum_bytes = costs.sum_bytes(replicas)
        in_sum = sum_bytes / costs.update_bytes  # updates as large as the sum
        copies, hops = replicas, 1  # of a sum that leave one machine
        if sum_bytes >= TREE_BYTES:
            copies = min(replicas, RunSpec.sum_fan_out)
            hops = _hops(replicas, RunSpec.sum_fan_out)
        sent = replicas * (costs.summed_bytes + WIRE_BYTES)
        sent += copies * (sum_bytes + WIRE_BYTES)
        travel_s = (hops + 1) * latency_s + hops * copies * link.seconds(sum_bytes)
        return _Traffic(
            messages_s=handling_s + in_sum * costs.decode_s / every,
            relay_s=replicas * handling_s
            + (SUMMED_ENTRIES * replicas + in_sum) * costs.decode_s / every,
            link_s=link.seconds(sent) / every,
            latency_s=travel_s,
            longest_s=travel_s + cycle_s + down_s,
            queue=1.0,
        )
    requests = max(min(announced, step_s / cycle_s), step_s / routing.BEAT_S)
    requests += min(peers * announced, step_s / down_s)
    handling_s = _handling_s(costs, requests, replicas / every)
    return _Traffic(
        messages_s=handling_s + decode_s,
        relay_s=replicas * handling_s,
        link_s=replicas * peers * exchange_s,
        # If updates arrive at the relay together, the first one is sent at once.
        latency_s=2 * latency_s + (down_s if replicas > 2 else 0.0),
        longest_s=2 * latency_s + cycle_s + down_s,
        queue=max(1.0, (unsent + in_relay) / nbytes),
    )


def _hops(replicas: int, fan_out: int) -> int:
    """Return the depth of a tree below a root that is none of the replicas.

    Example:
        >>> [_hops(replicas, 4) for replicas in (4, 5, 20, 21, 84)]
        [1, 2, 2, 3, 3]
    """
    hops, reached, width = 1, fan_out, fan_out
    while reached < replicas:
        width *= fan_out
        reached += width
        hops += 1
    return hops


def _handling_s(costs: Costs, requests: float, updates: float) -> float:
    """Return the time of requests at one end, each of which has the cost of one update.

    Further updates travel in the same requests.
    """
    return costs.request_s * requests + costs.item_s * max(0.0, updates - requests)


def _bounds(
    master: GradientSharing, traffic: _Traffic, busy_s: float
) -> list[tuple[float, str]]:
    """Return lower bounds of the step time, and their causes: updates in transit."""
    staleness = master.staleness_bound(STEPS_BEFORE)  # fixed, as the interval is
    every = master.pace().longest_after(STEPS_BEFORE)
    if staleness is None:  # no replica waits; exchanges are deferred
        return []
    capacities = [(traffic.link_s, "link"), (traffic.relay_s, "relay")]
    travel_s = traffic.latency_s if staleness == 0 else traffic.longest_s
    delays = [(travel_s / every, "latency"), *capacities]
    delay_s, cause = sum(seconds for seconds, _ in delays), max(delays)[1]
    if staleness == 0:  # a step and its delays follow each other
        return [(busy_s + delay_s, cause)]
    # A replica that is too far ahead waits for an update in transit: for one without
    # delay, or for the last one of a full queue. A queue of few large updates delays no
    # replica, because further exchanges are deferred.
    age = min(1.0, traffic.queue * every / staleness)
    return [
        (every * delay_s / staleness, cause),
        *((age * seconds, capacity) for seconds, capacity in capacities),
    ]
