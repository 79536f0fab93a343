"""Ray Train: its TorchTrainer over gloo, on a Ray cluster of one CPU for each host."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from benchmarks.peers.loop import (
    Arguments,
    Meeting,
    meet,
    parser,
    plain_step,
    put,
    read,
    train,
)

STORE_BYTES = 100 * 2**20  # Ray's own is not needed
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def node(own: Arguments) -> Iterator[subprocess.Popen[bytes]]:
    """This host's part of the cluster; rank 0 has the head."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += ["--disable-usage-stats", "--num-cpus=1"]
    command += [f"--node-ip-address={own.own}", f"--object-store-memory={STORE_BYTES}"]
    if own.rank == 0:
        command += ["--head", f"--port={own.port + 1}", "--include-dashboard=false"]
    else:
        command += [f"--address={own.address}:{own.port + 1}"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=_environment(own)
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # with --block it ends all that it has started


def _environment(own: Arguments) -> dict[str, str]:
    """Of the node, which its workers have too."""
    return {
        **os.environ,
        "GLOO_SOCKET_IFNAME": own.interface,
        "PYTHONPATH": str(ROOT),
        "RAY_DEDUP_LOGS": "0",
    }


def connect(own: Arguments) -> None:
    """To the cluster, when all of its nodes are there."""
    until = time.monotonic() + 120
    while True:
        try:
            ray.init(f"{own.address}:{own.port + 1}", log_to_driver=False)
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            break
    while len(ray.nodes()) < own.world and time.monotonic() < until:
        time.sleep(0.1)


def worker(config: dict[str, Any]) -> None:
    """What each of Ray's workers runs."""
    import torch

    torch.set_num_threads(1)
    own = replace(Arguments(**config), rank=get_context().get_world_rank())
    meeting = Meeting(own.address, own.port, own.world, hosts=False)
    module = own.model()
    model = prepare_model(module)
    step = plain_step(own, model, own.rule()(model.parameters()))
    train(own, meeting, module, step, block=1)


def main() -> None:
    own, _ = read(parser(__doc__))
    with node(own) as process:
        if own.rank > 0:
            process.wait()
            return
        meeting = meet(own)
        connect(own)
        TorchTrainer(
            worker,
            train_loop_config=asdict(own),
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=own.world, resources_per_worker={"CPU": 1}
            ),
        ).fit()
        put(own, meeting)
        ray.shutdown()


if __name__ == "__main__":
    main()
