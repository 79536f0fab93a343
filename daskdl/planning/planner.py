"""The user's function: measure here, predict for there."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from dask.system import CPU_COUNT
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from daskdl.config import check_type, check_whole, is_whole
from daskdl.data.arrays import first_rows, is_dask_array
from daskdl.data.checks import check_arrays, check_step
from daskdl.data.labels import LabelCheck
from daskdl.errors import DataError, OptionError
from daskdl.objective import Loss
from daskdl.planning.advice import Question, advise
from daskdl.planning.company import rehearse_together
from daskdl.planning.costs import Measured, mean
from daskdl.planning.network import Network
from daskdl.planning.plan import Plan
from daskdl.planning.rehearsal import rehearse
from daskdl.planning.scene import Script
from daskdl.serialization import Packed
from daskdl.thresholds import LinkAlgorithm
from daskdl.training.fit_state import starting_model
from daskdl.training.gradient_sharing import GradientSharing

MOST_PROCESSES = 8  # that measure at once; each imports torch
SLOWER = 4  # times as long as in turn, at most, if they measure at once


def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: tuple[Any, Any],
    workers: int | Iterable[int] = 64,
    link: Network | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    master: GradientSharing | None = None,
    threads: int | None = None,
) -> Plan:
    """Predict what workers are worth, before there are any.

    A copy of the model makes steps and exchanges on the batch, here, for some seconds;
    each part is timed, and requests over Dask's connections too. The efficiency for
    each number of workers follows from that and from the link. Left out are the start
    and end of a run and of its epochs, loading data, and workers of unequal speed.
    Each worker is taken to be a process like this one, with one replica.

    Without a `link` all workers, and the scheduler, are taken to be processes of this
    machine, as in a `LocalCluster`. Up to eight processes then measure at once, since
    they share its memory; that takes some seconds more.

    Args:
        model: As of a :class:`daskdl.Trainer`; a copy is used.
        batch: (X, y), the rows of one step: numpy arrays or torch tensors.
        workers: Plan for 1 to so many, or for these numbers.
        link: Between the workers' machines, or None, see above.
        loss: As of a trainer. None: `cross_entropy` for integer labels, else
            `mse_loss`.
        optimizer: As of a trainer. None: plain SGD with a learning rate of 0.01.
        master: How updates are shared; None: `GradientSharing()`.
        threads: Of torch, in each worker; None: as many as torch has here. It is what
            a `LocalCluster` calls `threads_per_worker`.

    Returns:
        What to expect. Print it.

    Raises:
        DataError: If the batch cannot be trained on.
        ModelError: If model, loss or optimizer cannot be used.
        OptionError: If another argument is outside what is allowed.
        DivergedError: If the loss became NaN or infinite within some steps.
        RunError: If a process that measures beside this one failed.

    Example:
        >>> model, X = nn.Linear(8, 3), torch.randn(32, 8)
        >>> network = Network(bandwidth_bits_per_s=1e9, latency_s=1e-3)
        >>> planned = plan(model, (X, X[:, :3]), workers=[1, 4], link=network)
        >>> [row.workers for row in planned.rows], planned.rows[0].limit
        ([1, 4], 'compute')
    """
    counts = _counts(workers)
    if link is not None:
        check_type("link", link, Network)
    master = GradientSharing() if master is None else master
    _check_master(master)
    check_whole("threads", threads, 1, None)
    if link is None and torch.cuda.is_available():
        raise OptionError(
            "link must be a daskdl.Network where workers compute on CUDA, got None: on "
            "one machine they would share its devices"
        )
    script = _script(model, batch, loss, optimizer, master, threads)
    measured = _measure(script, counts[-1] if link is None else 1)
    question = Question(measured, master, link, counts)
    return Plan(question.answers(), advise(question), measured, link)


def _counts(workers: Any) -> tuple[int, ...]:
    allowed = "workers must be a whole number >= 1, or several of them"
    if is_whole(workers):
        counts = set(range(1, workers + 1))
    elif isinstance(workers, Iterable) and not isinstance(workers, str | bytes):
        counts = set(workers)
    else:
        counts = set()
    sound = all(map(is_whole, counts))
    if not counts or not sound or min(counts) < 1:
        raise OptionError(f"{allowed}, got {workers!r}")
    return tuple(sorted(counts))


def _check_master(master: Any) -> None:
    check_type("master", master, GradientSharing)
    for rule in master.thresholds.values():
        if isinstance(rule, LinkAlgorithm):
            raise OptionError(
                "threshold must not follow the link in the master of a plan, which has "
                f"no link to send on, got {rule}; plan for each density in question, "
                "with TargetSparsityThreshold(target=...)"
            )
    replicas = master.replicas_per_worker
    if replicas == 1 or (replicas == "auto" and torch.cuda.device_count() <= 1):
        return
    raise OptionError(
        f"replicas_per_worker must be 1 in the master of a plan, got {replicas!r}; "
        "plan for as many workers with one replica each"
    )


def _script(
    model: Any, batch: Any, loss: Any, optimizer: Any, master: Any, threads: int | None
) -> Packed[Script]:
    X, y = _rows(batch)
    own = starting_model(model, seed=0)
    if loss is None:
        loss = functional.mse_loss if _is_floating(y) else functional.cross_entropy
    optimizer = _plain if optimizer is None else optimizer
    check_step(own, loss, optimizer, X, y)
    rows = first_rows(X, len(X)), first_rows(y, len(y))
    threads = torch.get_num_threads() if threads is None else threads
    return Packed(Script(own, loss, optimizer, rows, master, threads), "model")


def _rows(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise OptionError(f"batch must be a tuple (X, y), got a {type(batch).__name__}")
    if any(is_dask_array(part) for part in batch):
        raise DataError("batch must be in memory, got a dask.array; use compute()")
    try:
        check_arrays(*batch)
        LabelCheck().check(batch[1])
    except DataError as error:
        raise DataError(f"batch: {error}") from error
    return batch


def _is_floating(y: Any) -> bool:
    return bool(torch.from_numpy(first_rows(y, 1)).is_floating_point())


def _plain(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _measure(script: Packed[Script], workers_here: int) -> Measured:
    """Measure alone, and beside others where so many workers share this machine."""
    began = time.perf_counter()
    alone, cores = rehearse(script), CPU_COUNT
    took_s = time.perf_counter() - began
    measured = Measured(alone, cores)
    processes = min(workers_here, measured.most_at_once, MOST_PROCESSES)
    if processes < 2:
        return measured
    costs = rehearse_together(script, processes, SLOWER * processes * took_s)
    return Measured(alone, cores, mean(costs), processes)
