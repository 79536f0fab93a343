"""More replicas than there are cores: compute is a sleep, the channel is real.

Question: which share of its steps do 2 to 32 replicas make, for steps of 1 to 150 ms?
Counted:  each member of a run sleeps in place of a step, publishes an update, takes in
          what has arrived, and waits where it is more than `max_staleness` steps ahead
          when an interval of `exchange_every` steps begins.
          The updates are those of a real run of the MLP with 5.8 million parameters,
          two replicas and the default threshold, with their entries: sizes, encoding,
          decoding, relaying are real. Not done is what costs a core of its own on a
          real cluster: forward and backward pass, the search for entries in 5.8
          million differences, and adding the entries of others to the model.
          Efficiency: steps a second, beside the same loop without a channel, in the
          same run and as many processes. CPU of the scheduler's process (this one) and
          of all workers, of one core. Bytes of frames that a worker receives from all
          others; staleness in steps, at the end of each.
          Members are threads of up to eight worker processes, which share this
          machine's cores with the scheduler.
Run:      python -m benchmarks emulation
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from distributed import Client, get_worker, secede
from numpy.typing import NDArray

from benchmarks.clusters import bare_run, local_cluster
from benchmarks.report import lines
from benchmarks.results import Question
from benchmarks.work import WORKS, batches
from daskdl import AdaptiveThreshold, ResidualClipping, codec
from daskdl.channel.protocol import NAME, ChannelSpec
from daskdl.channel.remote import RemoteChannel
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import scaled

MOST_WORKERS = 8
MAX_STALENESS = 8  # the default of `GradientSharing`
# Deeplearning4j's, for steps at least as long as this.
GUIDANCE = {100.0: "good", 10.0: "sub-linear", 0.0: "no gain"}


STEPS = 80
LEFT_OUT = 20  # of these, while the threshold finds its place

Entries = tuple[
    float, np.ndarray
]  # the threshold, and int32 signed one-based positions


@dataclass(frozen=True)
class Recorded:
    """What two replicas sent, each step one update."""

    size: int  # parameters of the model
    updates: tuple[Entries, ...]  # in the order in which they were sent
    nbytes: float  # of an encoded update, the median

    def of(self, replica: int, number: int) -> Entries:
        """What a replica sends: each begins at another place."""
        return self.updates[(7 * replica + number) % len(self.updates)]


def recorded() -> Recorded:
    """Train two replicas for some steps, and keep what they sent."""
    task, stamp = WORKS["mlp"], codec.Stamp(0, 0, 1, 1)
    split = task.split()
    x, y = torch.from_numpy(split.x), torch.from_numpy(split.y)
    some = batches(x, y, task.batch_size, np.random.default_rng(0))
    replicas = []
    for _ in range(2):
        torch.manual_seed(0)
        module = task.model()
        rule, residual = AdaptiveThreshold(initial=None), ResidualClipping()
        compressor = Compressor(FlatParameters(module), rule, residual)
        optimizer = task.optimizer("SGD")(module.parameters())
        scale = compressor.vector.set_scale_(0.5)
        replicas.append((module, compressor, optimizer, scale))
    frames = []
    for _ in range(STEPS):
        sent = []
        for module, compressor, optimizer, scale in replicas:
            inputs, labels = next(some)
            optimizer.zero_grad()
            task.loss(module(inputs), labels).backward()
            with scaled(optimizer, scale):
                optimizer.step()
            compressor.vector.sync_from_parameters_()
            (update,) = compressor.propose()
            sent.append(update.encode(stamp))
            compressor.commit_(update)
        for frame, (_, compressor, *_) in zip(sent, reversed(replicas), strict=True):
            compressor.vector.apply_(codec.decode(frame.data))
        frames += sent
    kept = frames[2 * LEFT_OUT :]
    updates = [codec.decode(frame.data) for frame in kept]
    assert all(isinstance(update, codec.SparseUpdate) for update in updates)
    return Recorded(
        sum(p.numel() for p in module.parameters()),
        tuple((update.threshold, update.entries_K) for update in updates),
        float(np.median([frame.nbytes for frame in kept])),
    )


@dataclass(frozen=True)
class Case:
    """What each member does."""

    step_ms: float  # of a sleep in place of a step
    exchange_every: int  # steps between updates
    seconds: float  # that the steps take, if nothing holds them up

    @property
    def steps(self) -> int:
        return max(2 * self.exchange_every, round(1000 * self.seconds / self.step_ms))


@dataclass(frozen=True)
class Told:
    """What a member has seen."""

    seconds: float
    waited_s: float
    leads: Sequence[int]
    received_bytes: int


@dataclass(frozen=True)
class Row:
    replicas: int
    workers: int
    step_ms: float
    exchange_every: int
    routing: str
    kilobytes: float  # of an update
    efficiency: float
    waiting: float  # share of the time
    staleness: float  # mean over all steps and members
    staleness_max: int
    megabits_per_s: float  # that a worker receives
    scheduler_cpu: float  # of one core
    workers_cpu: float  # of one core, all together
    guidance: str


def compute(case: Case) -> float:
    """The steps alone; seconds. What the efficiency is measured by."""
    secede()
    started = time.monotonic()
    for _ in range(case.steps):
        time.sleep(case.step_ms / 1000)
    return time.monotonic() - started


def member(own: ChannelSpec, case: Case, updates: Recorded) -> Told:
    """Take part in a run: as many steps as `compute`, with exchanges."""
    secede()
    channel = RemoteChannel(get_worker().extensions[NAME], own)
    pace = GradientSharing(
        max_staleness=MAX_STALENESS, exchange_every=case.exchange_every
    )
    leads = []

    def encode(stamp: codec.Stamp) -> NDArray[np.uint8]:
        return codec.encode(stamp, own.size, *updates.of(own.replica, stamp.sequence))

    try:
        channel.join()
        channel.barrier("start", None)
        started = time.monotonic()
        for step in range(1, case.steps + 1):
            time.sleep(case.step_ms / 1000)
            exchanges = step % case.exchange_every == 0
            if exchanges:
                channel.publish(encode, step)
            if pace.announces(step):
                channel.progress(step)
            channel.drain()
            leads.append(pace.least_lead(step, channel.wait_for_peers(step, 0, None)))
            if exchanges:
                channel.wait_for_peers(step, 0, MAX_STALENESS)
        seconds = time.monotonic() - started
        traffic = channel.stats()
        channel.progress(case.steps, 0)  # nobody waits for who has ended
        channel.barrier("end", None)
    finally:
        channel.leave()
    waited_s = traffic.waits_s.get("staleness", 0.0)
    return Told(seconds, waited_s, leads, traffic.received_bytes)


def measure(
    client: Client, replicas: int, routing: str, case: Case, updates: Recorded
) -> Row:
    """One case, after the same steps without a channel."""
    workers = sorted(client.nthreads())
    seats = {replica: workers[replica % len(workers)] for replica in range(replicas)}
    alone = client.gather(
        [client.submit(compute, case, workers=[w], pure=False) for w in seats.values()]
    )
    held = client.scatter(updates, broadcast=True)
    with bare_run(client, seats, updates.size, routing) as spec:
        processes = [psutil.Process(pid) for pid in client.run(_pid).values()]
        before = [_cpu_s(process) for process in processes]
        own, began = time.process_time(), time.monotonic()
        told = client.gather(
            [
                client.submit(member, spec(r), case, held, workers=[worker], pure=False)
                for r, worker in seats.items()
            ]
        )
        seconds = time.monotonic() - began
        scheduler_cpu = (time.process_time() - own) / seconds
        used = [_cpu_s(p) - s for p, s in zip(processes, before, strict=True)]
    slowest = statistics.median(each.seconds for each in told)
    return Row(
        replicas,
        len(workers),
        case.step_ms,
        case.exchange_every,
        routing,
        updates.nbytes / 1e3,
        statistics.median(alone) / slowest,
        sum(each.waited_s for each in told) / sum(each.seconds for each in told),
        statistics.fmean(lead for each in told for lead in each.leads),
        max(lead for each in told for lead in each.leads),
        8e-6 * sum(each.received_bytes for each in told) / slowest / len(workers),
        scheduler_cpu,
        sum(used) / seconds,
        next(says for least, says in GUIDANCE.items() if case.step_ms >= least),
    )


def _pid(dask_worker: Any) -> int:
    return psutil.Process().pid


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    updates = recorded()
    for replicas in arguments.replicas:
        with local_cluster(min(replicas, MOST_WORKERS)) as own, Client(own) as client:
            warm = Case(10.0, 1, 0.5)  # the first frames load the kernels
            measure(client, replicas, arguments.routing, warm, updates)
            for step_ms in arguments.step_ms:
                for every in arguments.exchange_every:
                    case = Case(step_ms, every, arguments.seconds)
                    yield measure(client, replicas, arguments.routing, case, updates)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1, 10, 100, 150])
    parser.add_argument("--exchange-every", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--routing", choices=["plain", "mesh"], default="plain")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each case")


QUESTION = Question(
    "emulation",
    __doc__,
    options,
    rows,
    {"replicas": "d", "step_ms": "g", "exchange_every": "d", "routing": ""}
    | {"kilobytes": ".1f", "efficiency": ".3f", "waiting": ".3f"}
    | {"staleness": ".2f", "staleness_max": "d", "megabits_per_s": ".1f"}
    | {"scheduler_cpu": ".0%", "workers_cpu": ".0%", "guidance": ""},
    lambda result: lines(result, "replicas", "efficiency", "step_ms", "exchange_every"),
)
