"""Latency and throughput of the channel alone, relayed and from worker to worker.

Question: from how many members on is a mesh better than the relay?
Counted:  every member publishes updates of one size at a steady rate; the time from
          `publish` at the origin to each arrival, decoded, in an inbox; bytes that
          arrived; the share of updates that were taken at all (the rest stays in
          the residual); CPU time of the scheduler's process, which is this one.
          Members are threads of up to eight worker processes, all on
          this machine, so they share its cores: latencies grow when these are busy.
          Baselines: the same bytes through a raw TCP socket, and through Dask's rpc
          from worker to worker; half a round trip, and one request after the other.
Run:      python -m benchmarks channel --members 2 4 8 16 32
"""

import argparse
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from distributed import Client, get_worker, rpc, secede
from distributed.protocol import to_serialize
from numpy.typing import NDArray

from benchmarks.clusters import GRID, bare_run, local_cluster
from benchmarks.report import bars
from benchmarks.results import Question
from daskdl import codec
from daskdl.channel.protocol import NAME, ChannelSpec
from daskdl.channel.remote import RemoteChannel

MOST_WORKERS = 8
DENSITY = 100  # parameters for each entry
BYTES_PER_ENTRY = 1.14  # of GAPS at this density


@dataclass(frozen=True)
class Row:
    case: str
    members: int
    kilobytes: float  # of an update
    median_ms: float
    p99_ms: float
    megabytes_per_s: float  # that arrived, at all members together
    taken: float  # share of the updates that publish accepted
    scheduler_cpu: float  # of one core, that this process used meanwhile


def entries_of(kilobytes: float) -> np.ndarray:
    count = int(kilobytes * 1000 / BYTES_PER_ENTRY)
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(count * DENSITY, count, replace=False))
    signs = rng.choice((-1, 1), count)
    return ((positions + 1) * signs).astype(np.int32)


def member(own: ChannelSpec, entries_K: np.ndarray, rate: float, seconds: float):
    """Publish at a rate; returns when what was published, and when what arrived."""
    secede()
    plugin = get_worker().extensions[NAME]
    channel = RemoteChannel(plugin, own)
    inbox = plugin.endpoints[own.run, own.replica].inbox
    arrivals, published, offered = {}, {}, 0
    put = inbox.put

    def timed_put(item, update):
        first = put(item, update)
        if first:
            arrivals[item.origin, item.sequence] = time.time()
        return first

    def encode(stamp: codec.Stamp) -> NDArray[np.uint8]:
        frame = codec.encode(stamp, own.size, 16 * GRID, entries_K)
        published[own.replica, stamp.sequence] = (time.time(), frame.nbytes)
        return frame

    inbox.put = timed_put
    try:
        channel.join()
        channel.barrier("start", None)
        started = time.monotonic()
        step = 0
        # Not all in the same moment.
        next_at = started + (own.replica % 10) / 10 / rate
        while next_at < started + seconds:
            time.sleep(max(0.0, next_at - time.monotonic()))
            step += 1
            if not channel.publish(encode, step):
                published.pop((own.replica, channel.published + 1), None)
            offered += 1
            channel.progress(step)
            channel.drain()
            next_at += 1 / rate
        channel.barrier("end", None)
        channel.drain()
    finally:
        channel.leave()
    return published, arrivals, offered


def measure(client, routing, members, kilobytes, rate, seconds) -> Row:
    entries_K = entries_of(kilobytes)
    workers = sorted(client.nthreads())
    seats = {r: workers[r % len(workers)] for r in range(members)}
    with bare_run(client, seats, entries_K.size * DENSITY, routing) as spec:
        cpu, started = time.process_time(), time.perf_counter()
        futures = [
            client.submit(
                member,
                spec(replica),
                entries_K,
                rate,
                seconds,
                workers=[worker],
                pure=False,
            )
            for replica, worker in seats.items()
        ]
        told = client.gather(futures)
    published = {key: when for each, _, _ in told for key, when in each.items()}
    latencies, nbytes = [], 0
    for _, arrivals, _ in told:
        for key, arrived in arrivals.items():
            latencies.append(arrived - published[key][0])
            nbytes += published[key][1]
    scheduler_cpu = (time.process_time() - cpu) / (time.perf_counter() - started)
    first = min(when for when, _ in published.values())
    last = max(arrived for _, arrivals, _ in told for arrived in arrivals.values())
    sizes = [size for _, size in published.values()]
    return Row(
        routing,
        members,
        statistics.median(sizes) / 1e3,
        1e3 * float(np.median(latencies)),
        1e3 * float(np.quantile(latencies, 0.99)),
        nbytes / (last - first) / 1e6,
        len(published) / sum(offered for _, _, offered in told),
        scheduler_cpu,
    )


def timed(ask, payload, case: str, seconds: float) -> Row:
    """Requests one after the other, for so long."""
    halves = []
    cpu, started = time.process_time(), time.perf_counter()
    while time.perf_counter() < started + seconds:
        before = time.perf_counter()
        ask(payload)
        halves.append((time.perf_counter() - before) / 2)
    rate = len(halves) * len(payload) / (time.perf_counter() - started) / 1e6
    return Row(
        case,
        2,
        len(payload) / 1e3,
        1e3 * float(np.median(halves)),
        1e3 * float(np.quantile(halves, 0.99)),
        rate,
        1.0,
        (time.process_time() - cpu) / (time.perf_counter() - started),
    )


def raw_socket(payload: bytes, seconds: float) -> Row:
    """To a thread that answers one byte when all has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            peer, _ = server.accept()
            with peer:
                while True:
                    left = len(payload)
                    while left:
                        got = len(peer.recv(min(left, 2**18)))
                        if not got:
                            return
                        left -= got
                    peer.sendall(b"!")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def ask(data):
                own.sendall(data)
                own.recv(1)

            row = timed(ask, payload, "raw TCP socket", seconds)
        thread.join()
    return row


def dask_rpc(client, payload: bytes, seconds: float) -> Row:
    """From this process to a worker that takes it and says so."""

    def take(dask_worker):
        async def benchmark_take(data):
            return len(data)

        dask_worker.handlers["benchmark_take"] = benchmark_take

    client.run(take)
    peer = rpc(sorted(client.nthreads())[0])
    frame = np.frombuffer(payload, np.uint8)

    async def request():
        await peer.benchmark_take(data=to_serialize(frame))

    try:
        return timed(lambda _: client.sync(request), payload, "Dask rpc", seconds)
    finally:
        client.sync(peer.close_rpc)


def rows(arguments) -> Iterator[Row]:
    for members in arguments.members:
        with local_cluster(min(members, MOST_WORKERS)) as own, Client(own) as client:
            # The first frames load the kernels.
            measure(client, "plain", members, 1, arguments.rate, 1)
            for kilobytes in arguments.kilobytes:
                if members == arguments.members[0]:
                    payload = secrets.token_bytes(int(kilobytes * 1000))
                    yield raw_socket(payload, arguments.seconds / 2)
                    yield dask_rpc(client, payload, arguments.seconds / 2)
                for routing in ("plain", "mesh"):
                    case = (members, kilobytes, arguments.rate, arguments.seconds)
                    yield measure(client, routing, *case)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[10, 100])
    parser.add_argument("--rate", type=float, default=10.0, help="updates/s of each")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")


QUESTION = Question(
    "channel",
    __doc__,
    options,
    rows,
    {"case": "", "members": "d", "kilobytes": ".1f", "median_ms": ".2f"}
    | {"p99_ms": ".1f", "megabytes_per_s": ".1f", "taken": ".2f"}
    | {"scheduler_cpu": ".0%"},
    lambda result: bars(result, "median_ms", "case", "members"),
)
