"""How many replicas, and on which workers."""

import logging
import math
from collections.abc import Sequence

import torch
from distributed import Client

from daskdl.data.pieces import workers_of
from daskdl.errors import OptionError
from daskdl.training.base import TrainingMaster

logger = logging.getLogger(__name__)


def seats_of(
    master: TrainingMaster, client: Client, examples: int, batch_size: int
) -> dict[int, str]:
    """Choose a worker address for each replica, by number from 0.

    There are at most as many replicas as there are batches in an epoch: more would
    have nothing to do.

    Raises:
        OptionError: If the cluster has no workers.
    """
    workers = workers_of(client)
    each = replicas_on(master, client, workers)
    # Round robin, so that leaving some out leaves the workers evenly used.
    seats = [w for i in range(max(each.values())) for w in workers if i < each[w]]
    useful = math.ceil(examples / batch_size)
    if len(seats) > useful:
        logger.info("%s batches only: %s of %s replicas", useful, useful, len(seats))
    return dict(enumerate(seats[:useful]))


def replicas_here(master: TrainingMaster, examples: int, batch_size: int) -> int:
    """Choose how many replicas this process is to have; not more than batches.

    Raises:
        OptionError: If that is fewer than `min_replicas`: nobody can come later.
    """
    each = master.replicas_per_worker
    wanted = max(1, torch.cuda.device_count()) if each == "auto" else int(each)
    useful = math.ceil(examples / batch_size)
    if wanted > useful:
        logger.info("%s batches only: %s of %s replicas", useful, useful, wanted)
    replicas = min(wanted, useful)
    if master.min_replicas > replicas:
        raise OptionError(
            f"min_replicas must be at most {replicas}, the number of replicas in this "
            f"process, got {master.min_replicas}; without a cluster no more will come: "
            "set replicas_per_worker"
        )
    return replicas


def replicas_on(
    master: TrainingMaster, client: Client, workers: Sequence[str]
) -> dict[str, int]:
    """How many replicas each of these workers is to have."""
    if master.replicas_per_worker != "auto":
        return dict.fromkeys(workers, int(master.replicas_per_worker))
    devices = client.run(torch.cuda.device_count, workers=workers)
    return {worker: max(1, devices[worker]) for worker in workers}
