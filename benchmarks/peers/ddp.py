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
    meet,
    parser,
    plain_step,
    read,
    report,
    train,
)


@contextlib.contextmanager
def group(own: Arguments) -> Iterator[Meeting]:
    """All processes of the contestant as the default group."""
    os.environ["GLOO_SOCKET_IFNAME"] = own.interface
    meeting = meet(own)
    distributed.init_process_group(
        "gloo",
        f"tcp://{own.address}:{own.port + 1}",
        rank=own.rank,
        world_size=own.world,
        timeout=PATIENCE,
    )
    try:
        yield meeting
    finally:
        distributed.destroy_process_group()


FIRST = 2  # step of PowerSGD, from 0; no earlier one is allowed
WARM_UP = {"none": Least(), "fp16": Least(), "powersgd": Least(warm_up=FIRST + 1)}
# Its hook starts collectives in callbacks. With several buckets their order is not the
# same on all ranks, and gloo ends the processes. So there is one.
BUCKET_MB = {"none": None, "fp16": None, "powersgd": 1024}


def compress(model: DistributedDataParallel, hook: str) -> None:
    """Register a hook by its name."""
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=FIRST
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def plain(own: Arguments) -> None:
    """One process, or several that know nothing of each other."""
    model = own.model()
    step = plain_step(own, model, own.rule()(model.parameters()))
    meeting = meet(own)
    train(own, meeting, model, step, block=None)
    report(own, meeting)


def data_parallel(own: Arguments, meeting: Meeting, hook: str) -> None:
    """Average gradients in each step."""
    module: nn.Module = own.model()
    model = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB[hook])
    compress(model, hook)
    step = plain_step(own, model, own.rule()(model.parameters()))
    train(own, meeting, module, step, block=1, least=WARM_UP[hook])


def post_local(own: Arguments, meeting: Meeting, every: int) -> None:
    """Average models after so many steps, as `PostLocalSGDOptimizer` documents it.

    There is no warm-up of synchronous steps.
    """
    module = own.model()
    model = DistributedDataParallel(module)
    # Each process is a subgroup of its own: gradients are not averaged.
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        own.rule()(model.parameters()),
        averagers.PeriodicModelAverager(period=every, warmup_steps=0),
    )
    step = plain_step(own, model, optimizer)
    train(own, meeting, module, step, block=every)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--way", choices=("plain", "ddp", "post-local"), default="ddp")
    made.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    made.add_argument("--every", type=int, default=16, help="steps between two means")
    own, more = read(made)
    if more.way == "plain":
        plain(own)
        return
    with group(own) as meeting:
        if more.way == "ddp":
            data_parallel(own, meeting, more.hook)
        else:
            post_local(own, meeting, more.every)
        report(own, meeting)


if __name__ == "__main__":
    main()
