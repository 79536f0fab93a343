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
def group(own: Arguments) -> Iterator[None]:
    """All processes of the contestant as the default group."""
    os.environ["GLOO_SOCKET_IFNAME"] = own.interface
    distributed.init_process_group(
        "gloo",
        f"tcp://{own.address}:{own.port + 1}",
        rank=own.rank,
        world_size=own.world,
        timeout=PATIENCE,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def data_parallel(
    own: Arguments, meeting: Meeting, module: nn.Module, hook: str
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
    optimizer = own.new_optimizer()(model.parameters())
    train(own, meeting, model, optimizer, block=1, least=least, scored=module)


def post_local(own: Arguments, meeting: Meeting, module: nn.Module, every: int) -> None:
    """Average models every few steps, without a warm-up of synchronous steps."""
    model = DistributedDataParallel(module)
    # Each process is its own subgroup, so gradients are not averaged.
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        own.new_optimizer()(model.parameters()),
        averagers.PeriodicModelAverager(period=every, warmup_steps=0),
    )
    train(own, meeting, model, optimizer, block=every, scored=module)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--way", choices=("plain", "ddp", "post-local"), default="ddp")
    made.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    made.add_argument("--every", type=int, default=16, help="steps between two means")
    own, more = read(made)
    meeting, module = Meeting(own), own.model()
    if more.way == "plain":
        optimizer = own.new_optimizer()(module.parameters())
        train(own, meeting, module, optimizer, block=None)
        report(own, meeting)
        return
    with group(own):
        if more.way == "ddp":
            data_parallel(own, meeting, module, more.hook)
        else:
            post_local(own, meeting, module, more.every)
        report(own, meeting)


if __name__ == "__main__":
    main()
