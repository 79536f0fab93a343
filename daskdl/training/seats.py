"""How many replicas, and on which workers."""

import logging
import math
import sys
from collections.abc import Sequence

import torch
from distributed import Client

from daskdl.data.futures import answers_of, workers_of
from daskdl.errors import OptionError
from daskdl.training.base import TrainingMaster

logger = logging.getLogger(__name__)


def most_replicas(examples: int | None, batch_size: int) -> int:
    """One for each step in an epoch: more would have nothing to do.

    Args:
        examples: Rows of the data; None: not known, so there is no limit.
        batch_size: Rows of a step, which may be those of several batches.
    """
    return sys.maxsize if examples is None else math.ceil(examples / batch_size)


def seats_of(master: TrainingMaster, client: Client, most: int) -> dict[int, str]:
    """Choose a worker address for each replica, by number from 0.

    Args:
        master: Says how many each worker is to have.
        client: Of the cluster.
        most: Replicas, see `most_replicas`.

    Raises:
        OptionError: If the cluster has no workers.
        OSError: If one of them does not answer.
    """
    workers = workers_of(client)
    try:
        each = replicas_on(master, client, workers)
    except OSError:
        there = set(client.nthreads())
        if there.issuperset(workers):
            raise
        return seats_of(master, client, most)  # one has gone meanwhile
    # Round robin, so that leaving some out leaves the workers evenly used.
    seats = [w for i in range(max(each.values())) for w in workers if i < each[w]]
    return dict(enumerate(seats[: _useful(len(seats), most)]))


def replicas_here(master: TrainingMaster, most: int) -> int:
    """Choose how many replicas this process is to have.

    Args:
        master: Says how many it is to have.
        most: See `most_replicas`.

    Raises:
        OptionError: If that is fewer than `min_replicas`: nobody can come later.
    """
    each = master.replicas_per_worker
    wanted = max(1, torch.cuda.device_count()) if each == "auto" else int(each)
    replicas = _useful(wanted, most)
    if master.min_replicas > replicas:
        raise OptionError(
            f"min_replicas must be at most {replicas}, the number of replicas in this "
            f"process, got {master.min_replicas}; without a cluster no more will come: "
            "set replicas_per_worker"
        )
    return replicas


def _useful(wanted: int, most: int) -> int:
    if wanted > most:
        logger.info("%s batches only: %s of %s replicas", most, most, wanted)
    return min(wanted, most)


def replicas_on(
    master: TrainingMaster, client: Client, workers: Sequence[str]
) -> dict[str, int]:
    """How many replicas each of these workers is to have.

    Raises:
        OSError: If a worker is gone, or does not answer; the latter is a
            WaitTimeoutError.
    """
    if master.replicas_per_worker != "auto":
        return dict.fromkeys(workers, int(master.replicas_per_worker))
    bound = master.timeouts().bound("request")
    what = "how many CUDA devices they have"
    devices = answers_of(client, workers, torch.cuda.device_count, bound, what)
    return {worker: max(1, devices[worker]) for worker in workers}
