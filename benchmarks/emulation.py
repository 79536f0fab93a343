"""More replicas than cores: steps are sleeps, the channel is real.

Question: What share of its speed does a replica keep in a run of 2 to 256 replicas,
          with steps of 1 ms to 1 s, and what do messages and decoding cost it?
Counted:  Each member of a run leases rows, sleeps in place of a step, publishes an
          update, takes in updates that have arrived, and waits where it is more than
          `max_staleness` steps ahead when an interval begins. All members meet at a
          barrier before the first step, which they take at different moments of an
          interval, and after the last one. "default" chooses the steps between
          exchanges as `GradientSharing()` does after its first 2048 steps, from the
          duration of an exchange: what it takes here, and what is left out. The updates
          are those of a real run of the MLP with 5.8 million parameters (fewer with
          `--width`), two replicas, the default threshold and 16 steps between
          exchanges: sizes, encoding, decoding and relaying are real. Left out is what
          takes a core of its own on a real cluster: forward and backward pass, the
          search for entries, committing them, and applying those of others.
          Efficiency: steps per second, relative to the same loop without a channel, in
          the same run and with as many processes. CPU of the scheduler's process (this
          one) and of all workers, in cores. For each replica and second: kilobytes of
          frames that it receives, requests to its worker and to the scheduler, the time
          to decode the frames, at the speed of the real run, and CPU of the scheduler;
          for each exchange, kilobytes of frames that it receives.
          Staleness in steps, at the end of each. Members are threads of up to
          `--processes` workers, which share this machine's cores with the scheduler.
          Memory: of all workers, at the end.
          "merged": the scheduler sends updates as sums, so a member receives one frame
          for all of them, and the time to apply a dense update counts. The time to
          decode is that of a sum of one update of each member, on a core of its own.
Run:      python -m benchmarks emulation
          python -m benchmarks emulation --replicas 2 16 64 --step-ms 1000
              --exchange-every 0 --seconds 80 --routing auto mesh
          python -m benchmarks emulation --replicas 64 128 256 --step-ms 1000
              --exchange-every 64 --width 512
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import torch
from distributed import Client, get_worker, secede

from benchmarks.clusters import MAX_WORKERS, local_client, run_members, spread
from benchmarks.report import lines
from benchmarks.results import Question
from benchmarks.work import SIDE, WIDTH, WORKS, batches, perceptron
from daskdl import KeepResidual, SampledThreshold, codec
from daskdl.channel.leasing import Lease
from daskdl.channel.protocol import NAME, UNSENT_BYTES, ChannelSpec
from daskdl.channel.remote import RemoteChannel
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import scaled
from daskdl.training.pace import MeasuredInterval

# Of Deeplearning4j, for steps of at least so many milliseconds.
GUIDANCE = {100.0: "good", 10.0: "sub-linear", 0.0: "no gain"}
EVERY = 16  # steps between the exchanges of the real run
EXCHANGES = 20
ALONE_S = 8.0  # of steps without a channel, at most
LEFT_OUT = 4  # of these exchanges, before buffers are warm
MADE = 2048  # steps, after which exchanging may take no more than 3 %


@dataclass(frozen=True)
class Recording:
    """Updates of two replicas, one per exchange."""

    size: int  # parameters of the model
    updates: Sequence[tuple[Any, ...]]  # threshold, entries, kind and levels
    nbytes: float  # of an encoded update, median
    decode_s: float  # to decode an update, median
    search_s: float  # to find entries and to commit them, median
    apply_s: float  # to apply an update of the other replica, median
    dense_s: float  # to apply a dense update, median

    def encode(self, replica: int, stamp: codec.Stamp) -> np.ndarray:
        """The frame of an update. Each replica begins at another place."""
        place = (7 * replica + stamp.sequence) % len(self.updates)
        threshold, entries_K, kind, levels_K = self.updates[place]
        return codec.encode(stamp, self.size, threshold, entries_K, kind, levels_K)


@functools.cache
def record(width: int, *, summed: bool) -> Recording:
    task, stamp = WORKS["mlp"], codec.Stamp(0, 0, 1, 1)
    split = task.split()
    x, y = torch.from_numpy(split.x), torch.from_numpy(split.y)
    some = batches(x, y, task.batch_size, np.random.default_rng(0))
    replicas = []
    for _ in range(2):
        torch.manual_seed(0)
        module = perceptron(SIDE * SIDE, width, width, 10)
        rule = SampledThreshold()
        parameters = FlatParameters(module)
        compressor = Compressor(parameters, rule, KeepResidual(), summed=summed)
        optimizer = task.optimizer("SGD")(module.parameters())
        scale = compressor.vector.set_scale_(0.5)
        replicas.append((module, compressor, optimizer, scale))
    frames, times = [], []
    for step in range(1, EVERY * EXCHANGES + 1):
        for module, _, optimizer, scale in replicas:
            inputs, labels = next(some)
            optimizer.zero_grad()
            task.loss(module(inputs), labels).backward()
            with scaled(optimizer, scale):
                optimizer.step()
        if step % EVERY:
            continue
        for k, (_, compressor, *_) in enumerate(replicas):
            peer = replicas[1 - k][1].vector
            compressor.vector.sync_from_parameters_()
            clock = [time.monotonic()]
            (update,) = compressor.propose()
            clock.append(time.monotonic())
            frame = update.encode(stamp)
            clock.append(time.monotonic())
            compressor.commit_(update)
            clock.append(time.monotonic())
            received = codec.decode(frame.data)
            clock.append(time.monotonic())
            peer.apply_(received)
            clock.append(time.monotonic())
            frames.append(frame)
            times.append(np.diff(clock))
    dense_s, zeros_N = [], np.zeros(compressor.vector.size, np.int32)
    for _ in range(EXCHANGES):
        began = time.monotonic()
        compressor.vector.apply_counts_(zeros_N)
        dense_s.append(time.monotonic() - began)
    kept = frames[2 * LEFT_OUT :]
    updates = [codec.decode(frame.data) for frame in kept]
    assert all(isinstance(update, codec.SparseUpdate) for update in updates)
    find_s, _, commit_s, decode_s, apply_s = np.median(times[2 * LEFT_OUT :], axis=0)
    return Recording(
        sum(p.numel() for p in module.parameters()),
        [(u.threshold, u.entries_K, u.kind, u.levels_K) for u in updates],
        float(np.median([frame.nbytes for frame in kept])),
        float(decode_s),
        float(find_s + commit_s),
        float(apply_s),
        float(np.median(dense_s)),
    )


def sum_of(updates: Recording, replicas: int) -> tuple[int, float]:
    """Bytes of the sum of an update of each replica, and the time to decode it."""
    parts = []
    for replica in range(replicas):
        frame = updates.encode(replica, codec.Stamp(1, replica, 1, 1))
        parts.append(codec.decode(frame.data))
    total, times = codec.encode_sum(1, parts), []
    total_N = np.zeros(updates.size, np.int32)
    for _ in range(EXCHANGES):
        began = time.monotonic()
        codec.decode_sum(total).add_(total_N, 1)
        times.append(time.monotonic() - began)
    return total.nbytes, statistics.median(times)


@dataclass(frozen=True)
class Case:
    step_ms: float  # of a sleep in place of a step
    exchange_every: int | None  # None: as chosen by default
    seconds: float  # of all steps, without waits

    @property
    def steps(self) -> int:
        least = 2 * (self.exchange_every or 1)
        return max(least, round(1000 * self.seconds / self.step_ms))


def without_channel(case: Case) -> float:
    """Seconds of a step alone."""
    secede()
    steps = max(3, round(1000 * min(case.seconds, ALONE_S) / case.step_ms))
    began = time.monotonic()
    for _ in range(steps):
        time.sleep(case.step_ms / 1000)
    return (time.monotonic() - began) / steps


def member(
    spec: ChannelSpec, case: Case, updates: Recording, replicas: int
) -> dict[str, Any]:
    """Take as many steps, with exchanges."""
    secede()
    channel = RemoteChannel(get_worker().extensions[NAME], spec)
    master = GradientSharing(
        exchange_every=case.exchange_every or "auto",
        routing=spec.routing,
    )
    interval = MeasuredInterval(master.pace())
    interval.note(0.0, 1.0)  # the first one does not count
    applies_s = (
        updates.dense_s
        if spec.routing == "merged"
        else (replicas - 1) * updates.apply_s
    )
    exchange_s = updates.search_s + applies_s
    interval.note(exchange_s, case.step_ms / 1000)  # of an exchange before
    leads, spent_s, published = [], 0.0, 0
    leased_until, finished = 0, list[dict[str, Any]]()

    encode = functools.partial(updates.encode, spec.replica)
    try:
        channel.join()
        channel.barrier("start", None)
        interval.choose_(MADE)
        # Replicas drift apart: their exchanges are spread over an interval.
        time.sleep(spec.replica / replicas * interval.steps * case.step_ms / 1000)
        began = time.monotonic()
        for step in range(1, case.steps + 1):
            if step > leased_until:
                lease = channel.lease("train", 0, finished)
                assert isinstance(lease, Lease)
                leased_until += lease.rows
                finished = [
                    {"lease": lease.number, "examples": lease.rows, "loss": 0.0}
                ]
            time.sleep(case.step_ms / 1000)
            interval.choose_(MADE + step)
            exchanges = step % interval.steps == 0
            started = time.monotonic()
            if exchanges and channel.has_room(unsent=UNSENT_BYTES):
                published += channel.publish(encode, step) is not None
                left_out_s = updates.search_s + spent_s
                whole_s = time.monotonic() - started + left_out_s
                interval.note(whole_s, case.step_ms / 1000)
                spent_s = 0.0
            if exchanges or master.announces(step):
                channel.progress(step)
            taken = channel.drain()
            sparse = sum(isinstance(u, codec.SparseUpdate) for u in taken.updates)
            dense = len(taken.updates) - sparse + (taken.folded_N is not None)
            spent_s += sparse * updates.apply_s + dense * updates.dense_s
            leads.append(master.least_lead(step, channel.wait_for_peers(step, 0, None)))
            if exchanges:
                channel.wait_for_peers(step, 0, master.staleness_bound(MADE + step))
        seconds = time.monotonic() - began
        traffic = channel.stats()
        channel.progress(case.steps, 0)  # so that nobody waits for this one
        channel.barrier("end", None)
    finally:
        channel.leave()
    return {
        "seconds": seconds,
        "every": interval.steps,
        "waited_s": traffic.waits_s.get("staleness", 0.0),
        "leads": leads,
        "received_bytes": traffic.received_bytes,
        "published": published,
    }


def measured(
    client: Client,
    replicas: int,
    routing: str,
    case: Case,
    width: int,
) -> dict[str, Any]:
    """One case, after the same steps without a channel."""
    places = spread(client, replicas)
    loops = [
        client.submit(without_channel, case, workers=[worker], pure=False)
        for worker in places.values()
    ]
    alone_s = case.steps * statistics.median(client.gather(loops))
    updates = record(width, summed=routing == "merged")
    held = client.scatter(updates, broadcast=True)
    members, usage = run_members(
        client,
        replicas,
        updates.size,
        routing,
        member,
        case,
        held,
        replicas,
        # A member that is faster than others leases more rows.
        rows=2 * replicas * case.steps,
    )
    workers = len(set(places.values()))
    seconds = statistics.median(result["seconds"] for result in members)
    leads = [lead for result in members for lead in result["leads"]]
    received = sum(result["received_bytes"] for result in members)
    waited_s, all_s, published = (
        sum(result[k] for result in members)
        for k in ("waited_s", "seconds", "published")
    )
    nbytes, decode_s = updates.nbytes, updates.decode_s
    if routing == "merged":
        nbytes, decode_s = sum_of(updates, replicas)
    return {
        "case": f"every {case.exchange_every}" if case.exchange_every else "default",
        "replicas": replicas,
        "workers": workers,
        "step_ms": case.step_ms,
        "exchange_every": statistics.median_low(result["every"] for result in members),
        "routing": routing,
        "kilobytes": updates.nbytes / 1e3,
        "efficiency": alone_s / seconds,
        "waiting": waited_s / all_s,
        "staleness": statistics.fmean(leads),
        "staleness_max": max(leads),
        "megabits_per_s": 8e-6 * received / seconds / workers,
        "received_kb": received / 1e3 / seconds / replicas,
        "exchange_kb": received / 1e3 / published,
        "requests": usage.workers_requests / usage.seconds / replicas,
        "scheduler_requests": usage.scheduler_requests / usage.seconds / replicas,
        "decode_ms": 1e3 * (received / nbytes * decode_s / seconds / replicas),
        "scheduler_ms": 1e3 * usage.scheduler_cpu / replicas,
        "scheduler_cpu": usage.scheduler_cpu,
        "workers_cpu": usage.workers_cpu,
        "memory_gib": usage.memory_bytes / 2**30,
        "guidance": next(g for least, g in GUIDANCE.items() if case.step_ms >= least),
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for replicas in asked.replicas:
        with (
            dask.config.set({"distributed.comm.timeouts.connect": "300s"}),
            local_client(min(replicas, asked.processes)) as client,
        ):
            warm = Case(10.0, 1, 0.5)  # the first frames load the kernels
            workers = len(client.nthreads())
            routings = dict.fromkeys(
                GradientSharing(routing=routing).routing_for(replicas)
                for routing in asked.routing
            )
            for routing in routings:
                measured(client, workers, routing, warm, asked.width)
                for step_ms, every in itertools.product(
                    asked.step_ms, asked.exchange_every
                ):
                    case = Case(step_ms, every or None, asked.seconds)
                    yield measured(client, replicas, routing, case, asked.width)


QUESTION = Question(
    "emulation",
    __doc__,
    rows,
    "case replicas:d step_ms:g exchange_every:d routing kilobytes:.1f efficiency:.3f "
    "waiting:.3f staleness:.2f staleness_max:d megabits_per_s:.1f received_kb:.1f "
    "exchange_kb:.1f requests:.1f scheduler_requests:.1f decode_ms:.1f "
    "scheduler_ms:.2f scheduler_cpu:.0% workers_cpu:.0% memory_gib:.1f guidance",
    {
        "--replicas": [2, 4, 8, 16, 32],
        "--step-ms": [1.0, 10.0, 100.0, 150.0],
        "--exchange-every": {
            **{"type": int, "nargs": "+", "default": [0, 1, 16]},
            "help": "0: as chosen by default",
        },
        "--width": {"type": int, "default": WIDTH, "help": "of the MLP"},
        "--routing": ["auto"],
        "--processes": MAX_WORKERS,
        "--seconds": {"type": float, "default": 8.0, "help": "of each case"},
    },
    lambda result: lines(result, "replicas", "efficiency", "step_ms", "case"),
)
