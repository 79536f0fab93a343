"""More replicas than cores: steps are sleeps, the channel is real.

Question: What share of its speed does a replica keep in a run of 2 to 32 replicas, with
          steps of 1 to 150 ms?
Counted:  Each member of a run sleeps in place of a step, publishes an update, takes in
          updates that have arrived, and waits where it is more than `max_staleness`
          steps ahead when an interval of `exchange_every` steps begins. The updates are
          those of a real run of the MLP with 5.8 million parameters, two replicas and
          the default threshold: sizes, encoding, decoding and relaying are real. Left
          out is what takes a core of its own on a real cluster: forward and backward
          pass, the search for entries, and applying the entries of others. Efficiency:
          steps per second, relative to the same loop without a channel, in the same run
          and with as many processes. CPU of the scheduler's process (this one) and of
          all workers, in cores. Bytes of frames that a worker receives; staleness in
          steps, at the end of each. Members are threads of up to eight worker
          processes, which share this machine's cores with the scheduler.
Run:      python -m benchmarks emulation
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from distributed import Client, get_worker, secede

from benchmarks.clusters import MOST_WORKERS, local_client, run_members, spread
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

MAX_STALENESS = 8  # the default of `GradientSharing`
# Of Deeplearning4j, for steps of at least so many milliseconds.
GUIDANCE = {100.0: "good", 10.0: "sub-linear", 0.0: "no gain"}
STEPS = 80
LEFT_OUT = 20  # of these steps, while the threshold adapts


@dataclass(frozen=True)
class Recording:
    """Updates of two replicas, one per step."""

    size: int  # parameters of the model
    updates: Sequence[tuple[Any, ...]]  # threshold, entries, kind and levels
    nbytes: float  # of an encoded update, median

    def update(self, replica: int, number: int) -> tuple[Any, ...]:
        """Each replica begins at another place."""
        return self.updates[(7 * replica + number) % len(self.updates)]


def record() -> Recording:
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
    return Recording(
        sum(p.numel() for p in module.parameters()),
        [(u.threshold, u.entries_K, u.kind, u.levels_K) for u in updates],
        float(np.median([frame.nbytes for frame in kept])),
    )


@dataclass(frozen=True)
class Case:
    step_ms: float  # of a sleep in place of a step
    exchange_every: int
    seconds: float  # of all steps, without waits

    @property
    def steps(self) -> int:
        return max(2 * self.exchange_every, round(1000 * self.seconds / self.step_ms))


def without_channel(case: Case) -> float:
    """Seconds of the steps alone."""
    secede()
    began = time.monotonic()
    for _ in range(case.steps):
        time.sleep(case.step_ms / 1000)
    return time.monotonic() - began


def member(own: ChannelSpec, case: Case, updates: Recording) -> dict[str, Any]:
    """Take as many steps, with exchanges."""
    secede()
    channel = RemoteChannel(get_worker().extensions[NAME], own)
    pace = GradientSharing(
        max_staleness=MAX_STALENESS, exchange_every=case.exchange_every
    )
    leads = []

    def encode(stamp: codec.Stamp) -> np.ndarray:
        update = updates.update(own.replica, stamp.sequence)
        return codec.encode(stamp, own.size, *update)

    try:
        channel.join()
        channel.barrier("start", None)
        began = time.monotonic()
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
        seconds = time.monotonic() - began
        traffic = channel.stats()
        channel.progress(case.steps, 0)  # so that nobody waits for this one
        channel.barrier("end", None)
    finally:
        channel.leave()
    return {
        "seconds": seconds,
        "waited_s": traffic.waits_s.get("staleness", 0.0),
        "leads": leads,
        "received_bytes": traffic.received_bytes,
    }


def measured(
    client: Client, replicas: int, routing: str, case: Case, updates: Recording
) -> dict[str, Any]:
    """One case, after the same steps without a channel."""
    places = spread(client, replicas)
    loops = [
        client.submit(without_channel, case, workers=[worker], pure=False)
        for worker in places.values()
    ]
    alone_s = statistics.median(client.gather(loops))
    held = client.scatter(updates, broadcast=True)
    found, scheduler_cpu, workers_cpu = run_members(
        client, replicas, updates.size, routing, member, case, held
    )
    workers = len(set(places.values()))
    seconds = statistics.median(own["seconds"] for own in found)
    leads = [lead for own in found for lead in own["leads"]]
    received = sum(own["received_bytes"] for own in found)
    waited_s, all_s = (sum(own[k] for own in found) for k in ("waited_s", "seconds"))
    return {
        "replicas": replicas,
        "workers": workers,
        "step_ms": case.step_ms,
        "exchange_every": case.exchange_every,
        "routing": routing,
        "kilobytes": updates.nbytes / 1e3,
        "efficiency": alone_s / seconds,
        "waiting": waited_s / all_s,
        "staleness": statistics.fmean(leads),
        "staleness_max": max(leads),
        "megabits_per_s": 8e-6 * received / seconds / workers,
        "scheduler_cpu": scheduler_cpu,
        "workers_cpu": workers_cpu,
        "guidance": next(g for least, g in GUIDANCE.items() if case.step_ms >= least),
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    updates = record()
    for replicas in asked.replicas:
        with local_client(min(replicas, MOST_WORKERS)) as client:
            warm = Case(10.0, 1, 0.5)  # the first frames load the kernels
            measured(client, replicas, asked.routing, warm, updates)
            for step_ms in asked.step_ms:
                for every in asked.exchange_every:
                    case = Case(step_ms, every, asked.seconds)
                    yield measured(client, replicas, asked.routing, case, updates)


QUESTION = Question(
    "emulation",
    __doc__,
    rows,
    "replicas:d step_ms:g exchange_every:d routing kilobytes:.1f efficiency:.3f "
    "waiting:.3f staleness:.2f staleness_max:d megabits_per_s:.1f scheduler_cpu:.0% "
    "workers_cpu:.0% guidance",
    {
        "--replicas": [2, 4, 8, 16, 32],
        "--step-ms": [1.0, 10.0, 100.0, 150.0],
        "--exchange-every": [1, 16],
        "--routing": {"choices": ["plain", "mesh"], "default": "plain"},
        "--seconds": {"type": float, "default": 8.0, "help": "of each case"},
    },
    lambda result: lines(result, "replicas", "efficiency", "step_ms", "exchange_every"),
)
