"""PyTorch's DistributedDataParallel over gloo, and its communication hooks.

PowerSGD as its documentation has it: rank 1, with error feedback and a warm start; but
it begins at once, where `start_powerSGD_iter` would make the first thousand steps those
of plain DDP.
"""

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.arguments import parser, read
from benchmarks.peers.gauge import Least
from benchmarks.peers.groups import group
from benchmarks.peers.loop import plain_step, report, train

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


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    own, more = read(made)
    with group(own) as meeting:
        module: nn.Module = own.model()
        model = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB[more.hook])
        compress(model, more.hook)
        step = plain_step(own, model, own.rule()(model.parameters()))
        train(own, meeting, module, step, block=1, least=WARM_UP[more.hook])
        report(own, meeting)


if __name__ == "__main__":
    main()
