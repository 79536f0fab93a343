"""Ray Train: its TorchTrainer over gloo, on a Ray cluster of one CPU for each host."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from benchmarks.peers.loop import (
    Arguments,
    Meeting,
    parser,
    print_summary,
    read,
    train,
)
from benchmarks.results import ROOT

STORE_BYTES = 100 * 2**20  # Ray's own is not needed


@contextlib.contextmanager
def node(arguments: Arguments) -> Iterator[subprocess.Popen[bytes]]:
    """A node of the cluster on this host; rank 0 has the head."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += ["--disable-usage-stats", "--num-cpus=1"]
    command += [
        f"--node-ip-address={arguments.host}",
        f"--object-store-memory={STORE_BYTES}",
    ]
    if arguments.rank == 0:
        command += [
            "--head",
            f"--port={arguments.port + 1}",
            "--include-dashboard=false",
        ]
    else:
        command += [f"--address={arguments.address}:{arguments.port + 1}"]
    environment = {  # of the node and of its workers
        **os.environ,
        "GLOO_SOCKET_IFNAME": arguments.interface,
        "PYTHONPATH": str(ROOT),
        "RAY_DEDUP_LOGS": "0",
    }
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # with --block it ends all that it has started


def connect(arguments: Arguments) -> None:
    """Connect to the cluster, and wait for all nodes."""
    until = time.monotonic() + 120
    while True:
        try:
            ray.init(f"{arguments.address}:{arguments.port + 1}", log_to_driver=False)
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            break
    while len(ray.nodes()) < arguments.world and time.monotonic() < until:
        time.sleep(0.1)


def worker(config: dict[str, Any]) -> None:
    """Runs on each of Ray's workers."""
    import torch

    torch.set_num_threads(1)
    arguments = replace(Arguments(**config), rank=get_context().get_world_rank())
    meeting = Meeting(arguments, host=False)
    module = arguments.model()
    model = prepare_model(module)
    optimizer = arguments.new_optimizer()(model.parameters())
    train(arguments, meeting, model, optimizer, block=1, scored=module)


def main() -> None:
    arguments, _ = read(parser(__doc__))
    with node(arguments) as process:
        if arguments.rank > 0:
            process.wait()
            return
        meeting = Meeting(arguments)
        connect(arguments)
        TorchTrainer(
            worker,
            train_loop_config=asdict(arguments),
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=arguments.world, resources_per_worker={"CPU": 1}
            ),
        ).fit()
        print_summary(arguments, meeting)
        ray.shutdown()


if __name__ == "__main__":
    main()
