"""Simulated clusters for tests that were written for Dask's own test tools."""

import functools
import inspect

from tests.sim.network import SCHEDULER, Network, Server, SimScheduler, SimWorker
from tests.sim.world import Process, World

LIMIT_S = 3600.0  # virtual


class TestClient(Server):
    """What tests use of Dask's client."""

    __test__ = False

    def __init__(self, network, scheduler):
        super().__init__(network, "tcp://client:1", "client")
        self.id = "client"
        self.scheduler = self.rpc(SCHEDULER)
        scheduler.clients.add(self.id)

    async def register_plugin(self, plugin):
        """The plugins are there already."""


class TestWorker(SimWorker):
    """A worker whose `close` returns when it has ended."""

    __test__ = False

    async def close(self):
        await self.plugin.retire()
        self.network.end(self, 0.0)
        self.scheduler.worker_gone(self)


def run_simulated(test, count):
    """Run a coroutine function with a client, a scheduler and so many workers.

    All share one event loop, as in `gen_cluster`.
    """
    world = World(seed=0)
    network = Network(world, shared=Process(world, "all"))
    scheduler = SimScheduler(network)
    workers = [
        TestWorker(network, scheduler, f"tcp://127.0.0.1:{number + 1}", f"{number}")
        for number in range(count)
    ]
    client = TestClient(network, scheduler)
    running = network.shared.loop.create_task(test(client, scheduler, *workers))
    try:
        world.run(running.done, LIMIT_S)
        running.result()
    finally:
        world.close()


def simulated(count):
    """As `tests.support.channels.workers`, on a simulated cluster."""

    def decorate(test):
        @functools.wraps(test)
        def wrapper(**parameters):
            run_simulated(functools.partial(test, **parameters), count)

        # What pytest looks at: all but the cluster.
        parameters_of_test = [*inspect.signature(test).parameters.values()]
        kinds = [parameter.kind for parameter in parameters_of_test]
        starred = inspect.Parameter.VAR_POSITIONAL
        others = parameters_of_test[
            kinds.index(starred) + 1 if starred in kinds else 2 + count :
        ]
        wrapper.__signature__ = inspect.Signature(others)
        return wrapper

    return decorate
