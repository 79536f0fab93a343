"""`daskdl.plan`: measures costs on this machine, predicts how many workers pay off."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from dask.base import is_dask_collection
from dask.system import CPU_COUNT
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from daskdl.config import check_type, check_whole, is_whole
from daskdl.data.checks import LabelCheck, check_training, dry_run, optimizer_function
from daskdl.data.tables import as_numpy, check_arrays
from daskdl.errors import DataError, OptionError, count_of, short_tracebacks
from daskdl.objective import Loss
from daskdl.planning.cost_model import Measured, Network, Prediction, predict
from daskdl.planning.measure import BenchmarkSpec, measure
from daskdl.serialization import Packed, copied
from daskdl.training.fit_spec import starting_model
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.util import check_main_guard

SHOWN_ROWS = 16  # a longer table shows powers of two and the last row
HEADINGS = ("workers", "efficiency", "samples/s", "step ms", "limit", "carried")
MAX_PROCESSES = 8  # that measure at once; each imports torch
SLOWDOWN = 4  # most times as long that simultaneous processes may take

# Two workers of a linear model with steps of 0.1 ms are 1.2 times as fast as one; the
# costs of its steps and exchanges alone predict 1.6.
MIN_STEP_S = 1e-3
MIN_EFFICIENCY = 0.5  # at which workers pay off
MIN_CARRIED = 0.5  # share of exchanges at which replicas learn from each other
FACTORS = (4, 16)  # of steps between exchanges, or of the batch, to try
SPARSER = 10  # divisor of the density to try


@dataclass(frozen=True, repr=False)
class Plan:
    """Predicted speeds for several numbers of workers, made by :func:`daskdl.plan`.

    Printing a plan shows a table, abridged if it is long, and the advice.

    Attributes:
        rows: A prediction for each number of workers, with the fields `workers`,
            `efficiency`, `samples_per_s`, `step_s`, `limit`, `carried`, and the parts
            of a step, `compute_s`, `encode_s`, `apply_s`, `messages_s` and `wait_s`.
        advice: How many workers pay off, and which changes would make more pay off.
        measured: The measured costs; `measured.alone` are those of one worker.
        link: Network between the workers' machines. None: all workers are on this
            machine.

    Example:
        >>> import torch, daskdl
        >>> batch = torch.randn(32, 8), torch.randint(0, 3, (32,))
        >>> network = daskdl.Network(bandwidth_bits_per_s=1e9, latency_s=1e-3)
        >>> plan = daskdl.plan(torch.nn.Linear(8, 3), batch, workers=2, link=network)
        >>> [row.workers for row in plan.rows], plan.rows[0].efficiency
        ([1, 2], 1.0)
    """

    rows: tuple[Prediction, ...]
    advice: str
    measured: Measured
    link: Network | None

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame` indexed by workers; needs pandas."""
        import pandas as pd

        rows = [dataclasses.asdict(row) for row in self.rows]
        return pd.DataFrame(rows).set_index("workers")

    @override
    def __repr__(self) -> str:
        costs = self.measured.alone
        where = "processes on this machine" if self.link is None else str(self.link)
        threads = "1 thread" if costs.threads == 1 else f"{costs.threads} threads"
        heading = (
            f"{costs.parameters:,} parameters, {costs.rows:,} rows a step, {threads}; "
            f"{costs.update_bytes / 1e3:,.1f} KB an update; {where}"
        )
        few = len(self.rows) <= SHOWN_ROWS
        table = [HEADINGS] + [
            (
                f"{row.workers}",
                f"{row.efficiency:.2f}",
                f"{row.samples_per_s:,.0f}",
                f"{1e3 * row.step_s:,.1f}",
                row.limit,
                f"{row.carried:.0%}",
            )
            for row in self.rows
            if few or not row.workers & (row.workers - 1) or row is self.rows[-1]
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))
            for cells in table
        ]
        return "\n".join([heading, *lines, self.advice])


@short_tracebacks
def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: tuple[Any, Any],
    workers: int | Iterable[int] = 64,
    link: Network | None = None,
    *,
    loss: Loss | None = None,
    optimizer: str | Callable[..., Optimizer] | None = None,
    master: GradientSharing | None = None,
    threads: int | None = None,
) -> Plan:
    """Predict how much faster several workers would train.

    For a few seconds, this measures steps and exchanges of a copy of the model on this
    machine, and requests over Dask's connections. These costs and the link determine
    the efficiency for each number of workers. Predictions ignore the start and the end
    of runs and epochs, the loading of data, and differences in speed between workers.
    Each worker is assumed to be a process like this one, with one replica.

    Without a `link`, all workers and the scheduler are assumed to be processes on this
    machine, as in a `LocalCluster`. Up to eight processes then measure at the same
    time, because they share the machine's memory; this takes a few seconds more. The
    script then needs ``if __name__ == "__main__":``, as with a `LocalCluster`.

    Args:
        model: As for a :class:`daskdl.Trainer`; a copy is used.
        batch: (X, y), the rows of one step: numpy arrays or torch tensors.
        workers: The largest number of workers, to plan for 1 up to this number; or the
            numbers to plan for. Each is >= 1.
        link: Network between the workers' machines. None: see above.
        loss: As for a trainer. None: `cross_entropy` for integer labels, else
            `mse_loss`.
        optimizer: As for a trainer, without `lr`. None: plain SGD with a learning rate
            of 0.01.
        master: How updates are shared. None: `GradientSharing()`.
        threads: Number of torch threads in each worker, >= 1; the
            `threads_per_worker` of a `LocalCluster`. None: as many as in this process.

    Returns:
        Predictions with advice, which print as a table.

    Raises:
        DataError: If the batch cannot be used for training.
        ModelError: If model, loss or optimizer cannot be used.
        OptionError: If another argument is not allowed.
        DivergedError: If the loss became NaN or infinite within a few steps.
        RunError: If a measuring process died.
        WaitTimeoutError: If a measuring process took too long.

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
            "link must be a daskdl.Network if workers use CUDA, got None; workers on "
            "one machine would share its devices"
        )
    if link is None:
        check_main_guard("with a link, plan starts no other process")
    spec = _spec(model, batch, loss, optimizer, master, threads)
    measured = _measure(spec, counts[-1] if link is None else 1)
    rows = tuple(predict(measured, master, link, count) for count in counts)
    return Plan(rows, advise(rows, measured, master, link), measured, link)


def _counts(workers: Any) -> tuple[int, ...]:
    counts: set[Any] = set()
    if is_whole(workers):
        counts = set(range(1, workers + 1))
    elif isinstance(workers, Iterable) and not isinstance(workers, str | bytes):
        counts = set(workers)
    if not counts or not all(map(is_whole, counts)) or min(counts) < 1:
        raise OptionError(
            f"workers must be a whole number >= 1, or several such numbers, got "
            f"{workers!r}"
        )
    return tuple(sorted(counts))


def _check_master(master: Any) -> None:
    check_type("master", master, GradientSharing)
    replicas = master.replicas_per_worker
    if replicas == 1 or (replicas == "auto" and torch.cuda.device_count() <= 1):
        return
    raise OptionError(
        f"the master of a plan must have replicas_per_worker=1, got {replicas!r}; plan "
        "for more workers with one replica each"
    )


def _spec(
    model: Any, batch: Any, loss: Any, optimizer: Any, master: Any, threads: int | None
) -> Packed[BenchmarkSpec]:
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise OptionError(f"batch must be a tuple (X, y), got a {type(batch).__name__}")
    if any(map(is_dask_collection, batch)):
        raise DataError("batch must be in memory, got a Dask collection; use compute()")
    X, y = batch
    try:
        check_arrays(X, y)
        LabelCheck().check(y)
    except DataError as error:
        raise DataError(f"batch: {error}") from error
    start = starting_model(model, seed=0)
    rows = as_numpy(X), as_numpy(y)
    if loss is None:
        floating = rows[1].dtype.kind == "f"
        loss = functional.mse_loss if floating else functional.cross_entropy
    if optimizer is None:
        optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    optimizer = optimizer_function(optimizer)
    module = copied(start)
    check_training(module, loss, optimizer)
    run = dry_run(module, rows, None, loss)
    if run.labels is not None:
        run.labels.check(rows[1])
    threads = torch.get_num_threads() if threads is None else threads
    return Packed(BenchmarkSpec(start, loss, optimizer, rows, master, threads), "model")


def _measure(spec: Packed[BenchmarkSpec], workers_here: int) -> Measured:
    """Measure one process, and several together if workers share this machine."""
    started = time.perf_counter()
    [alone] = measure(spec)
    elapsed_s = time.perf_counter() - started
    measured = Measured(alone, CPU_COUNT)
    processes = min(workers_here, measured.most_at_once, MAX_PROCESSES)
    if processes < 2:
        return measured
    costs = measure(spec, processes, SLOWDOWN * processes * elapsed_s)
    means = {
        name: sum(getattr(cost, name) for cost in costs) / processes
        for name, value in vars(alone).items()
        if isinstance(value, float)
    }
    together = dataclasses.replace(alone, **means)
    return dataclasses.replace(measured, together=together, processes=processes)


def advise(
    rows: Sequence[Prediction],
    measured: Measured,
    master: GradientSharing,
    link: Network | None,
) -> str:
    """Say how many workers pay off, and which changes would make more pay off."""
    several = [row for row in rows if row.workers > 1]
    if not several:
        return (
            "A single worker sends nothing; plan for more workers to see whether they "
            "pay off."
        )
    if measured.alone.step_s < MIN_STEP_S:
        return _too_short(measured)
    paying = _most_paying(rows)
    if paying == several[-1]:
        return f"Pays off up to {_speedup(paying)}; no more workers were planned for."
    paying_workers = 1 if paying is None else paying.workers
    refused = next(row for row in several if row.workers > paying_workers)
    if refused.carried < MIN_CARRIED:
        cause = f"the {refused.limit} carries {refused.carried:.0%} of the exchanges"
    else:
        cause = (
            f"the limit is {refused.limit!r}, and the efficiency is "
            f"{refused.efficiency:.1%}"
        )
    cause = f"at {count_of(refused.workers, 'worker')}, {cause}"
    if paying is None:
        best = max(several, key=lambda row: row.samples_per_s)
        verdict = "Does not pay off" if best.speed <= 1 else "Hardly pays off"
        summary = f"{verdict}: {_speedup(best)} at best; {cause}."
    else:
        summary = f"Pays off up to {_speedup(paying)}; {cause}."
    remedies = []
    for changes in _changes(measured, master):
        for change in changes:
            predictions = [
                predict(change.costs, change.master, link, row.workers) for row in rows
            ]
            better = _most_paying(predictions)
            if better is not None and better.workers > paying_workers:
                remedies.append(f"{better.workers} with {change.name}")
                break  # the mildest change that helps is enough
    if remedies:
        return f"{summary} It would pay off up to {', '.join(remedies)}."
    useless = [f"{FACTORS[-1]} times the batch nor a tenth of the density"]
    if master.exchange_every != "auto":
        useless.insert(0, f"exchange_every={master.exchange_every * FACTORS[-1]}")
    return f"{summary} Neither {' nor '.join(useless)} would change that."


def _too_short(measured: Measured) -> str:
    """Say why steps of less than `MIN_STEP_S` do not pay off, and which would."""
    verdict = (
        f"Does not pay off: a step takes {1e3 * measured.alone.step_s:.2g} ms. Below "
        f"{1e3 * MIN_STEP_S:g} ms, taking batches, keeping statistics and the wake-ups "
        "of the event loop, which predictions ignore, take as long as steps."
    )
    for factor in FACTORS:
        step_s = measured.scaled(gradients_s=factor).alone.step_s
        if step_s >= MIN_STEP_S:
            return (
                f"{verdict} With {factor} times the batch (accumulate={factor}), a "
                f"step would take {1e3 * step_s:.2g} ms: plan for that batch."
            )
    return verdict


def _most_paying(rows: Sequence[Prediction]) -> Prediction | None:
    """Return the prediction for the most workers that pay off, or None."""
    paying = [
        row
        for row in rows
        if row.workers > 1
        and row.efficiency >= MIN_EFFICIENCY
        and row.carried >= MIN_CARRIED
        and row.speed > 1
    ]
    return paying[-1] if paying else None


def _speedup(row: Prediction) -> str:
    speed = f"{row.speed:.2g}" if row.speed < 10 else f"{row.speed:,.0f}"
    return f"{count_of(row.workers, 'worker')}, {speed} times as fast as one"


class Change(NamedTuple):
    """A change of the training that may make more workers pay off."""

    name: str
    costs: Measured
    master: GradientSharing


def _changes(measured: Measured, master: GradientSharing) -> Iterator[list[Change]]:
    """Yield changes that may help, by kind, the mildest first."""
    if master.exchange_every != "auto":
        yield [
            Change(
                f"exchange_every={factor * master.exchange_every}",
                # A rarer update has the entries of several updates.
                measured.scaled(apply_s=factor, decode_s=factor, update_bytes=factor),
                dataclasses.replace(
                    master, exchange_every=factor * master.exchange_every
                ),
            )
            for factor in FACTORS
        ]
    yield [
        Change(
            f"{factor} times the batch (accumulate={factor})",
            measured.scaled(rows=factor, gradients_s=factor),
            master,
        )
        for factor in FACTORS
    ]
    density = measured.alone.density
    yield [
        Change(
            f"a density of {density / SPARSER:.0e} instead of {density:.0e}",
            measured.scaled(update_bytes=1 / SPARSER),  # fewer entries save no time
            master,
        )
    ]
