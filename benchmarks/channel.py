"""Latency and throughput of the channel alone, relayed and from worker to worker.

Question: From how many members on is the mesh faster than the relay?
Counted:  Every member publishes updates of one size at a steady rate. Time from
          `publish` at the origin to each arrival, decoded, in an inbox; bytes that
          arrived; the share of updates that `publish` accepted (the rest stays in the
          residual); CPU time of the scheduler's process, which is this one. Members are
          threads of up to eight worker processes, which share this machine's cores, so
          latencies grow when these are busy. Baselines: the same bytes through a raw
          TCP socket, and through Dask's rpc to a worker; half a round trip, one request
          after the other.
Run:      python -m benchmarks channel --members 2 4 8 16 32
"""

import argparse
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from distributed import Client, get_worker, rpc, secede
from distributed.protocol import to_serialize

from benchmarks.clusters import GRID, MAX_WORKERS, local_client, run_members
from benchmarks.report import bars
from benchmarks.results import Question
from daskdl import codec
from daskdl.channel.protocol import NAME, ChannelSpec
from daskdl.channel.remote import RemoteChannel

DENSITY = 100  # parameters per entry
BYTES_PER_ENTRY = 1.14  # of GAPS at this density


def entries_of(kilobytes: float) -> np.ndarray:
    count = int(kilobytes * 1000 / BYTES_PER_ENTRY)
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(count * DENSITY, count, replace=False))
    signs = rng.choice((-1, 1), count)
    return ((positions + 1) * signs).astype(np.int32)


def member(
    spec: ChannelSpec, entries_K: np.ndarray, rate: float, seconds: float
) -> tuple[dict[Any, Any], dict[Any, float], int]:
    """Publish at a rate.

    Returns:
        Time and bytes of each published update and times of arrivals, by origin and
        sequence, and how many updates were offered.
    """
    secede()
    plugin = get_worker().extensions[NAME]
    channel = RemoteChannel(plugin, spec)
    inbox = plugin.endpoints[spec.run, spec.replica].inbox
    arrivals, published, offered = {}, {}, 0
    put = inbox.put

    def timed_put(item: Any, update: Any) -> bool:
        first = put(item, update)
        if first:
            arrivals[item.origin, item.sequence] = time.time()
        return first

    def encode(stamp: codec.Stamp) -> np.ndarray:
        frame = codec.encode(stamp, spec.size, 16 * GRID, entries_K)
        published[spec.replica, stamp.sequence] = (time.time(), frame.nbytes)
        return frame

    inbox.put = timed_put
    try:
        channel.join()
        channel.barrier("start", None)
        began = time.monotonic()
        next_at = began + (spec.replica % 10) / 10 / rate  # not all at once
        while next_at < began + seconds:
            time.sleep(max(0.0, next_at - time.monotonic()))
            offered += 1
            if channel.publish(encode, offered) is None:
                published.pop((spec.replica, channel.published + 1), None)
            channel.progress(offered)
            channel.drain()
            next_at += 1 / rate
        channel.barrier("end", None)
        channel.drain()
    finally:
        channel.leave()
    return published, arrivals, offered


def through_channel(
    client: Client,
    routing: str,
    members: int,
    kilobytes: float,
    rate: float,
    seconds: float,
) -> dict[str, Any]:
    entries_K = entries_of(kilobytes)
    results, usage = run_members(
        *(client, members, entries_K.size * DENSITY, routing),
        *(member, entries_K, rate, seconds),
    )
    published = {key: sent for each, _, _ in results for key, sent in each.items()}
    arrived = [pair for _, arrivals, _ in results for pair in arrivals.items()]
    latencies = [at - published[key][0] for key, at in arrived]
    first = min(at for at, _ in published.values())
    seconds = max(at for _, at in arrived) - first
    return {
        "case": routing,
        "members": members,
        "kilobytes": statistics.median(size for _, size in published.values()) / 1e3,
        "median_ms": 1e3 * float(np.median(latencies)),
        "p99_ms": 1e3 * float(np.quantile(latencies, 0.99)),
        "megabytes_per_s": sum(published[key][1] for key, _ in arrived) / seconds / 1e6,
        "taken": len(published) / sum(offered for _, _, offered in results),
        "scheduler_cpu": usage.scheduler_cpu,
    }


def one_by_one(
    case: str, request: Callable[[], Any], nbytes: int, seconds: float
) -> dict[str, Any]:
    """Send requests, each after the answer to the last."""
    halves = []
    cpu, began = time.process_time(), time.perf_counter()
    while time.perf_counter() < began + seconds:
        before = time.perf_counter()
        request()
        halves.append((time.perf_counter() - before) / 2)
    elapsed = time.perf_counter() - began
    return {
        "case": case,
        "members": 2,
        "kilobytes": nbytes / 1e3,
        "median_ms": 1e3 * float(np.median(halves)),
        "p99_ms": 1e3 * float(np.quantile(halves, 0.99)),
        "megabytes_per_s": len(halves) * nbytes / elapsed / 1e6,
        "taken": 1.0,
        "scheduler_cpu": (time.process_time() - cpu) / elapsed,
    }


def raw_socket(payload: bytes, seconds: float) -> dict[str, Any]:
    """To a thread that answers one byte when everything has arrived."""

    def serve(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            missing = len(payload)
            while received := len(peer.recv(min(missing, 2**18))):
                missing -= received
                if not missing:
                    peer.sendall(b"!")
                    missing = len(payload)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def request() -> None:
                connection.sendall(payload)
                connection.recv(1)

            row = one_by_one("raw TCP socket", request, len(payload), seconds)
        thread.join()
    return row


def dask_rpc(client: Client, payload: bytes, seconds: float) -> dict[str, Any]:
    """From this process to a worker."""

    def serve(dask_worker: Any) -> None:
        async def benchmark_take(data: Any) -> int:
            return len(data)

        dask_worker.handlers["benchmark_take"] = benchmark_take

    client.run(serve)
    peer = rpc(min(client.nthreads()))
    frame = np.frombuffer(payload, np.uint8)

    async def request() -> None:
        await peer.benchmark_take(data=to_serialize(frame))

    try:
        return one_by_one(
            "Dask rpc", lambda: client.sync(request), len(payload), seconds
        )
    finally:
        client.sync(peer.close_rpc)


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for members in asked.members:
        with local_client(min(members, MAX_WORKERS)) as client:
            # The first frames load the kernels.
            through_channel(client, "plain", members, 1, asked.rate, 1)
            for kilobytes in asked.kilobytes:
                if members == asked.members[0]:
                    payload = secrets.token_bytes(int(kilobytes * 1000))
                    yield raw_socket(payload, asked.seconds / 2)
                    yield dask_rpc(client, payload, asked.seconds / 2)
                for routing in ("plain", "mesh"):
                    case = (routing, members, kilobytes, asked.rate, asked.seconds)
                    yield through_channel(client, *case)


QUESTION = Question(
    "channel",
    __doc__,
    rows,
    "case members:d kilobytes:.1f median_ms:.2f p99_ms:.1f megabytes_per_s:.1f "
    "taken:.2f scheduler_cpu:.0%",
    {
        "--members": [2, 4, 8, 16, 32],
        "--kilobytes": [10.0, 100.0],
        "--rate": {"type": float, "default": 10.0, "help": "updates/s of each member"},
        "--seconds": {"type": float, "default": 5.0, "help": "of each case"},
    },
    lambda result: bars(result, "median_ms", "case", "kilobytes", group="members"),
)
