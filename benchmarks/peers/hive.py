"""hivemind: local updates, and the mean of all parameters now and then, in background.

`use_local_updates` is its asynchronous way of training. The matchmaking time is what
its documentation recommends for small local runs.
"""

import hivemind
import torch
from torch import nn

from benchmarks.peers.loop import (
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

MATCHMAKING_S = 3.0
AVERAGING_S = 120.0  # twice what 23 MB take at the slowest rate, both ways


def table(own: Arguments, meeting: Meeting) -> hivemind.DHT:
    """The distributed hash table, which begins at rank 0."""
    first: list[str] = [] if own.rank == 0 else meeting.hear("initial peers")
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{own.own}/tcp/0"], initial_peers=first, start=True
    )
    if own.rank == 0:
        meeting.say("initial peers", [str(a) for a in dht.get_visible_maddrs()])
    return dht


def optimizer_of(
    own: Arguments, dht: hivemind.DHT, model: nn.Module, every: int
) -> torch.optim.Optimizer:
    """Averages after so many steps of each process."""
    return hivemind.Optimizer(
        dht=dht,
        run_id=f"benchmark-{int(own.began)}",
        params=model.parameters(),
        optimizer=own.rule(),
        batch_size_per_step=own.task.batch_size,
        target_batch_size=every * own.task.batch_size * own.world,
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_S,
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--every", type=int, default=16, help="steps between two means")
    own, more = read(made)
    meeting = meet(own)
    dht = table(own, meeting)
    model = own.model()
    optimizer = optimizer_of(own, dht, model, more.every)
    step = plain_step(own, model, optimizer)
    train(own, meeting, model, step, block=None, least=Least(counted=2 * more.every))
    report(own, meeting)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
