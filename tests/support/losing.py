"""Updates that do not arrive between the workers of a cluster."""

import contextlib
import random
from collections.abc import Collection
from dataclasses import dataclass

from daskdl.channel.protocol import MessageKind
from daskdl.channel.worker import ReplicaEndpoint


@dataclass(frozen=True)
class Loss:
    """Chooses updates at random, the same ones in every process.

    Attributes:
        origins: Replicas whose updates get lost.
        probability: Of each update, for each of its receivers.
        seed: Seed of the choice.
    """

    origins: Collection[int]
    probability: float
    seed: int = 0

    def strikes(self, origin, sequence, receiver):
        """Whether a replica does not get an update of another one."""
        draw = random.Random(f"{self.seed} {origin} {sequence} {receiver}").random()
        return origin in self.origins and draw < self.probability


@contextlib.contextmanager
def losing(client, loss):
    """Lose the chosen updates on all workers; copies that are sent again arrive."""
    client.run(_install, loss)
    try:
        yield
    finally:
        client.run(_remove)


def _install(loss):
    original = ReplicaEndpoint.deliver

    async def deliver(self, message):
        lost = message.kind == MessageKind.UPDATE and loss.strikes(
            message.origin, message.sequence, self.connection.spec.replica
        )
        if not lost:
            return await original(self, message)
        self.inbox.lack(message)
        return True

    deliver.original = original
    ReplicaEndpoint.deliver = deliver


def _remove():
    ReplicaEndpoint.deliver = ReplicaEndpoint.deliver.original
