"""torchft: LocalSGD and DiLoCo, each process a replica group of its own.

The outer optimizer of DiLoCo is that of its authors.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.peers.loop import (
    PATIENCE,
    Arguments,
    Meeting,
    parser,
    read,
    report,
    train,
)


@contextlib.contextmanager
def managed(
    arguments: Arguments, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Manager]:
    """The manager of this process's group; rank 0 also has the lighthouse."""
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    lighthouse = arguments.port + 1
    if arguments.rank == 0:
        light = LighthouseServer(f"0.0.0.0:{lighthouse}", min_replicas=arguments.world)
    store = TCPStore(
        arguments.host,
        arguments.port + 2 + arguments.rank,
        is_master=True,
        timeout=PATIENCE,
        wait_for_workers=False,
    )

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load_state,
        state_dict=lambda: {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        min_replica_size=arguments.world,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=arguments.host,
        store_port=store.port,
        lighthouse_addr=f"http://{arguments.address}:{lighthouse}",
        replica_id=f"replica_{arguments.rank}",
        hostname=arguments.host,
        init_sync=False,  # all begin with the same seed
    )
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)
        if arguments.rank == 0:
            light.shutdown()


def rule(
    kind: str, manager: Manager, model: nn.Module, inner: Any, every: int
) -> contextlib.AbstractContextManager[Any]:
    """Hooks into the optimizer while it is entered."""
    if kind == "local-sgd":
        return LocalSGD(manager, model, inner, sync_every=every)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], inner, outer, sync_every=every)


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--rule", choices=("local-sgd", "diloco"), default="local-sgd")
    cli.add_argument("--every", type=int, default=16, help="steps between two means")
    arguments, more = read(cli)
    meeting, model = Meeting(arguments), arguments.model()
    inner = arguments.new_optimizer()(model.parameters())
    with managed(arguments, model, inner) as manager:
        with rule(more.rule, manager, model, inner, more.every):
            train(arguments, meeting, model, inner, block=more.every)
        report(arguments, meeting)


if __name__ == "__main__":
    main()
