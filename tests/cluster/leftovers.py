"""What runs leave on a cluster: nothing."""

import time

from daskdl.channel.scheduler import NAME


def left_behind(client):
    """What is on the scheduler and the workers when all should be forgotten."""

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.extensions.get(NAME)
        runs = list(plugin.runs) if plugin is not None else []
        return [*runs, *dask_scheduler.tasks]

    def on_worker(dask_worker):
        plugin = dask_worker.extensions.get(NAME)
        links = list(plugin.links) if plugin is not None else []
        return [*links, *dask_worker.data, *dask_worker.state.tasks]

    places = {"scheduler": client.run_on_scheduler(on_scheduler)}
    places |= client.run(on_worker)
    return {place: things for place, things in places.items() if things}


def still_left_behind(client, within_s=5.0):
    """The same, when Dask has had time to forget: releasing a future is a message."""
    deadline = time.monotonic() + within_s
    while (left := left_behind(client)) and time.monotonic() < deadline:
        pass  # each look asks the scheduler and every worker
    return left
