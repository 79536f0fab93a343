"""PyTorch's post-local SGD: steps of each process alone, then the mean of all models.

With the hook, the optimizer and the averager of `torch.distributed`, as the
documentation of `PostLocalSGDOptimizer` has them; with no warm-up of synchronous steps.
"""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.arguments import parser, read
from benchmarks.peers.groups import group
from benchmarks.peers.loop import plain_step, report, train


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--every", type=int, default=16, help="steps between two means")
    own, more = read(made)
    with group(own) as meeting:
        module = own.model()
        model = DistributedDataParallel(module)
        # Each process is a subgroup of its own: gradients are not averaged.
        alone, _ = torch.distributed.new_subgroups(group_size=1)
        state = hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
        model.register_comm_hook(state, hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            own.rule()(model.parameters()),
            averagers.PeriodicModelAverager(period=more.every, warmup_steps=0),
        )
        step = plain_step(own, model, optimizer)
        train(own, meeting, module, step, block=more.every)
        report(own, meeting)


if __name__ == "__main__":
    main()
