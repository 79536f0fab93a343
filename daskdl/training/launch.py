"""The task that Dask runs: seat a replica on its worker and let it train."""

from collections.abc import Mapping

from distributed import Worker, get_worker, secede

from daskdl.channel.remote import RemoteChannel
from daskdl.channel.worker import NAME, ChannelWorkerPlugin
from daskdl.data.source import Source
from daskdl.errors import ChannelError
from daskdl.packed import Packed
from daskdl.training.replica import Replica
from daskdl.training.surroundings import surroundings
from daskdl.training.task import Recipe, Result, TaskOptions
from daskdl.training.warmup import warm_up
from daskdl.training.worker_store import WorkerStore


def train_replica(
    recipe: Packed[Recipe],
    sources: Mapping[str, Packed[Source]],
    options: TaskOptions,
    number: int,
    seats: int,
    *,
    founder: bool,
) -> Result:
    """Train one replica on this worker, from start to end.

    Args:
        recipe: The user's objects.
        sources: Of the data that each worker has as a whole, by phase.
        options: The same for all replicas.
        number: Of this replica in the run.
        seats: Replicas of this run on this worker.
        founder: It is there from the start; nobody trains before it joins.
    """
    # Frees the slot for other tasks, and keeps adaptive clusters from closing us.
    secede()
    worker = get_worker()
    own = recipe.unpack()
    channel = _open_channel(worker, options, number, own)
    store = WorkerStore(sources, channel, options.timeouts, options.load_threads)
    result = None
    try:
        threads = max(1, worker.state.nthreads // seats)
        with surroundings(options.device, threads) as device:
            replica = Replica(number, options, own, channel, device, store)
            if not founder:
                warm_up(own, options.master, options.stepping, device)
            result = replica.run()
            return result
    finally:
        store.close()
        finished = result is not None and result.finished
        channel.leave(retires=channel.closing and not finished)


def _open_channel(
    worker: Worker, options: TaskOptions, number: int, own: Recipe
) -> RemoteChannel:
    plugin = worker.extensions.get(NAME)
    if not isinstance(plugin, ChannelWorkerPlugin):
        raise ChannelError(
            f"the daskdl plugin is not set up on {worker.address}; see the worker's log"
        )
    return plugin.open(options.endpoint(number, own))
