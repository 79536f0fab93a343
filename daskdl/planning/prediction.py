"""From costs to the speed of so many workers. Pure: nothing is measured or sent.

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

from dataclasses import dataclass
from typing import NamedTuple

from daskdl.planning.costs import Measured
from daskdl.planning.network import HERE, Network
from daskdl.planning.traffic import Crowd, Traffic
from daskdl.training.gradient_sharing import GradientSharing

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
