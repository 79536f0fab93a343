"""PyTorch's own ways: plain loops, DistributedDataParallel, post-local SGD."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop import (
    PATIENCE,
    Arguments,
    Least,
    Meeting,
    parser,
    read,
    report,
    train,
)

POWERSGD_FIRST = 2  # its first step, from 0; no earlier one is allowed


@contextlib.contextmanager
def group(arguments: Arguments) -> Iterator[None]:
    """All processes of the contestant as the default group."""
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    distributed.init_process_group(
        "gloo",
        f"tcp://{arguments.address}:{arguments.port + 1}",
        rank=arguments.rank,
        world_size=arguments.world,
        timeout=PATIENCE,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def data_parallel(
    arguments: Arguments, meeting: Meeting, module: nn.Module, hook: str
) -> None:
    """Average gradients in each step."""
    # PowerSGD's hook starts collectives in callbacks, with several buckets in another
    # order on each rank, and gloo then ends the processes. So it has one bucket.
    bucket_mb = 1024 if hook == "powersgd" else None
    model, least = DistributedDataParallel(module, bucket_cap_mb=bucket_mb), Least()
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        least = Least(warm_up=POWERSGD_FIRST + 1)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=POWERSGD_FIRST
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = arguments.new_optimizer()(model.parameters())
    train(arguments, meeting, model, optimizer, block=1, least=least, scored=module)


def post_local(
    arguments: Arguments, meeting: Meeting, module: nn.Module, every: int
) -> None:
    """Average models every few steps, without a warm-up of synchronous steps."""
    model = DistributedDataParallel(module)
    # Each process is its own subgroup, so gradients are not averaged.
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        arguments.new_optimizer()(model.parameters()),
        averagers.PeriodicModelAverager(period=every, warmup_steps=0),
    )
    train(arguments, meeting, model, optimizer, block=every, scored=module)


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--way", choices=("plain", "ddp", "post-local"), default="ddp")
    cli.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    cli.add_argument("--every", type=int, default=16, help="steps between two means")
    arguments, more = read(cli)
    meeting, module = Meeting(arguments), arguments.model()
    if more.way == "plain":
        optimizer = arguments.new_optimizer()(module.parameters())
        train(arguments, meeting, module, optimizer, block=None)
        report(arguments, meeting)
        return
    with group(arguments):
        if more.way == "ddp":
            data_parallel(arguments, meeting, module, more.hook)
        else:
            post_local(arguments, meeting, module, more.every)
        report(arguments, meeting)


if __name__ == "__main__":
    main()
