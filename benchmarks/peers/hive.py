"""hivemind: local updates, with the mean of all parameters computed in the background.

`use_local_updates` is its asynchronous mode. The matchmaking time is what its
documentation recommends for small local runs.
"""

import hivemind
import torch
from torch import nn

from benchmarks.peers.loop import (
    Arguments,
    Least,
    Meeting,
    parser,
    read,
    report,
    train,
)

MATCHMAKING_S = 3.0
AVERAGING_S = 120.0  # twice what 23 MB take at the slowest rate, both ways


def table(arguments: Arguments, meeting: Meeting) -> hivemind.DHT:
    """The distributed hash table, started by rank 0."""
    first: list[str] = [] if arguments.rank == 0 else meeting.get("initial peers")
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{arguments.host}/tcp/0"], initial_peers=first, start=True
    )
    if arguments.rank == 0:
        meeting.put("initial peers", [str(a) for a in dht.get_visible_maddrs()])
    return dht


def optimizer_of(
    arguments: Arguments, dht: hivemind.DHT, model: nn.Module, every: int
) -> torch.optim.Optimizer:
    """Averages after so many steps of each process."""
    return hivemind.Optimizer(
        dht=dht,
        run_id=f"benchmark-{int(arguments.began)}",
        params=model.parameters(),
        optimizer=arguments.new_optimizer(),
        batch_size_per_step=arguments.task.batch_size,
        target_batch_size=every * arguments.task.batch_size * arguments.world,
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_S,
    )


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--every", type=int, default=16, help="steps between two means")
    arguments, more = read(cli)
    meeting, model = Meeting(arguments), arguments.model()
    dht = table(arguments, meeting)
    optimizer = optimizer_of(arguments, dht, model, more.every)
    least = Least(counted=2 * more.every)
    train(arguments, meeting, model, optimizer, block=None, least=least)
    report(arguments, meeting)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
