"""The task that Dask runs: seat a replica on its worker and let it train."""

import torch
from distributed import Worker, get_worker, secede

from daskdl.channel.base import Channel
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.worker import NAME, ChannelWorkerPlugin
from daskdl.errors import ChannelError
from daskdl.failures import FailureInjection
from daskdl.packed import Packed
from daskdl.training.memory import freed_memory_kept
from daskdl.training.replica import Replica
from daskdl.training.task import Recipe, Result, TaskOptions
from daskdl.training.threads import torch_threads
from daskdl.training.warmup import warm_up


def train_replica(
    recipe: Packed[Recipe],
    options: TaskOptions,
    number: int,
    seats: int,
    *,
    founder: bool,
) -> Result:
    """Train one replica on this worker, from start to end.

    Args:
        recipe: The user's objects.
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
    try:
        device = pick_device(options.device, number)
        devices = [device] if device.type == "cuda" else []
        threads = max(1, worker.state.nthreads // seats)
        with (
            torch_threads(threads),
            freed_memory_kept(),
            torch.random.fork_rng(devices),
        ):
            replica = Replica(number, options, own, channel, device)
            if not founder:
                warm_up(own, options.master, device)
            return replica.run()
    finally:
        channel.leave()


def _open_channel(
    worker: Worker, options: TaskOptions, number: int, own: Recipe
) -> Channel:
    plugin = worker.extensions.get(NAME)
    if not isinstance(plugin, ChannelWorkerPlugin):
        raise ChannelError(
            f"the daskdl plugin is not set up on {worker.address}; see the worker's log"
        )
    injected = [c for c in own.callbacks if isinstance(c, FailureInjection)]
    return plugin.open(
        Endpoint(
            options.run,
            number,
            options.size,
            options.grid,
            options.outbox_bytes,
            options.inbox_bytes,
            options.timeouts,
            options.routing,
            options.master.fan_out,
            [failure for failure in injected if failure.kind == "drop"],
        )
    )


def pick_device(device: str, number: int) -> torch.device:
    """The device of a replica: ``"auto"`` takes the CUDA devices in turn, else CPU."""
    if device != "auto":
        return torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", number % count) if count else torch.device("cpu")
