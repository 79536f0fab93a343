"""`daskdl.plan`: measures on this machine, and predicts how many workers pay off."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from daskdl.errors import DataError, OptionError
from daskdl.objective import Loss
from daskdl.planning.cost_model import Measured, Network, Prediction, predict
from daskdl.planning.measure import BenchmarkSpec, measure
from daskdl.serialization import Packed, copied
from daskdl.training.fit_spec import starting_model
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.util import check_main_guard

SHOWN = 16  # rows; a longer table shows powers of two and the last row
HEADINGS = ("workers", "efficiency", "samples/s", "step ms", "limit", "carried")
MOST_PROCESSES = 8  # processes that measure at once; each imports torch
SLOWER = 4  # several at once may take this many times as long as one after the other

PAYS = 0.5  # least efficiency at which workers pay off
CARRIED = 0.5  # least share of exchanges at which replicas learn from each other
LONGER = (4, 16)  # factors of steps between exchanges, or of the batch, to consider
SPARSER = 10  # factor of fewer entries to consider


@dataclass(frozen=True, repr=False)
class Plan:
    """Predicted speeds for several numbers of workers, made by :func:`daskdl.plan`.

    Printing a plan shows a table, abridged if it is long, and the advice.

    Attributes:
        rows: A prediction for each number of workers, with the fields `workers`,
            `efficiency`, `samples_per_s`, `step_s`, `limit`, `carried`, and the parts
            of a step, `compute_s`, `encode_s`, `apply_s`, `messages_s` and `wait_s`.
        advice: How many workers pay off, and which change would make more pay off.
        measured: The measured costs; `measured.alone` are those of one worker.
        link: Between the workers' machines; None: all are on this machine.

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
        """All rows as a `pandas.DataFrame`, indexed by workers; needs pandas."""
        import pandas as pd

        rows = [dataclasses.asdict(row) for row in self.rows]
        return pd.DataFrame(rows).set_index("workers")

    @override
    def __repr__(self) -> str:
        costs = self.measured.alone
        where = "processes of this machine" if self.link is None else str(self.link)
        threads = "1 thread" if costs.threads == 1 else f"{costs.threads} threads"
        heading = (
            f"{costs.parameters:,} parameters, {costs.rows:,} rows a step, {threads}; "
            f"{costs.update_bytes / 1e3:,.1f} KB an update; {where}"
        )
        few = len(self.rows) <= SHOWN
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

    Times steps and exchanges of a copy of the model on this machine, for some seconds,
    and requests over Dask's connections. The efficiency for each number of workers
    follows from these costs and the link. Starts and ends of runs and epochs, loading
    data and workers of unequal speed are ignored. Each worker is assumed to be a
    process like this one, with one replica.

    Without a `link`, all workers and the scheduler are assumed to be processes of this
    machine, as in a `LocalCluster`. Up to eight processes then measure at once, since
    they share its memory, which takes some seconds more. Such a script needs
    ``if __name__ == "__main__":``, as with a `LocalCluster`.

    Args:
        model: As for a :class:`daskdl.Trainer`; a copy is used.
        batch: (X, y), the rows of one step: numpy arrays or torch tensors.
        workers: Plan for 1 up to this number, or for each of several numbers.
        link: Between the workers' machines, or None, see above.
        loss: As for a trainer. None: `cross_entropy` for integer labels, else
            `mse_loss`.
        optimizer: As for a trainer, without `lr`. None: plain SGD with a learning rate
            of 0.01.
        master: How updates are shared; None: `GradientSharing()`.
        threads: Of torch in each worker, `threads_per_worker` of a `LocalCluster`;
            None: as many as here.

    Returns:
        A table of predictions, with advice. Print it.

    Raises:
        DataError: If the batch cannot be trained on.
        ModelError: If model, loss or optimizer cannot be used.
        OptionError: If another argument is not allowed.
        DivergedError: If the loss became NaN or infinite within some steps.
        RunError: If a measuring process has ended.
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
            "link must be a daskdl.Network where workers compute on CUDA, got None: on "
            "one machine they would share its devices"
        )
    if link is None:
        check_main_guard("with a link, no other process is needed")
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
            f"workers must be a whole number >= 1, or several of them, got {workers!r}"
        )
    return tuple(sorted(counts))


def _check_master(master: Any) -> None:
    check_type("master", master, GradientSharing)
    replicas = master.replicas_per_worker
    if replicas == 1 or (replicas == "auto" and torch.cuda.device_count() <= 1):
        return
    raise OptionError(
        f"replicas_per_worker must be 1 in the master of a plan, got {replicas!r}; "
        "plan for as many workers with one replica each"
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
    """Measure one process, and several if workers share this machine."""
    began = time.perf_counter()
    [alone] = measure(spec)
    took_s = time.perf_counter() - began
    measured = Measured(alone, CPU_COUNT)
    processes = min(workers_here, measured.most_at_once, MOST_PROCESSES)
    if processes < 2:
        return measured
    costs = measure(spec, processes, SLOWER * processes * took_s)
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
    """Say how many workers pay off, and which change would make more pay off."""
    several = [row for row in rows if row.workers > 1]
    if not several:
        return "One worker sends nothing: ask for more to see whether they pay."
    paying = _paying(rows)
    if paying == several[-1]:
        return f"Pays up to {_as_fast(paying)}; nothing was asked about more."
    now = 1 if paying is None else paying.workers
    refused = next(row for row in several if row.workers > now)
    if refused.carried < CARRIED:
        cause = f"the {refused.limit} carries {refused.carried:.0%} of the exchanges"
    else:
        cause = (
            f"the limit is {refused.limit!r}, and the efficiency "
            f"{refused.efficiency:.1%}"
        )
    cause = f"{cause} at {refused.workers} workers"
    if paying is None:
        best = max(several, key=lambda row: row.samples_per_s)
        verdict = "Does not pay" if best.speed <= 1 else "Hardly pays"
        summary = f"{verdict}: {_as_fast(best)} at best; {cause}."
    else:
        summary = f"Pays up to {_as_fast(paying)}; then {cause}."
    remedies = []
    for changes in _changes(measured, master):
        for how, costs, changed in changes:
            predictions = [predict(costs, changed, link, row.workers) for row in rows]
            better = _paying(predictions)
            if better is not None and better.workers > now:
                remedies.append(f"{better.workers} with {how}")
                break  # the mildest change that helps is enough
    if remedies:
        return f"{summary} It would pay up to {', '.join(remedies)}."
    others = [f"{LONGER[-1]} times the batch nor a tenth of the density"]
    if master.exchange_every != "auto":
        others.insert(0, f"exchange_every={master.exchange_every * LONGER[-1]}")
    return f"{summary} Neither {' nor '.join(others)} would change that."


def _paying(rows: Sequence[Prediction]) -> Prediction | None:
    """Return the prediction for the most workers that pay off, or None."""
    pays = [
        row
        for row in rows
        if row.workers > 1
        and row.efficiency >= PAYS
        and row.carried >= CARRIED
        and row.speed > 1
    ]
    return pays[-1] if pays else None


def _as_fast(row: Prediction) -> str:
    return f"{row.workers} workers, {row.speed:.2g} times as fast as one"


Change = tuple[str, Measured, GradientSharing]  # its name, costs and master


def _changes(measured: Measured, master: GradientSharing) -> Iterator[list[Change]]:
    """Yield changes that may help, by kind, the mildest first."""
    gathering, batches = [], []
    for factor in LONGER:
        if master.exchange_every != "auto":
            every = factor * master.exchange_every
            rarer = dataclasses.replace(master, exchange_every=every)
            # A rarer update has the entries of several updates.
            costs = measured.scaled(
                apply_s=factor, decode_s=factor, update_bytes=factor
            )
            gathering.append((f"exchange_every={every}", costs, rarer))
        larger = measured.scaled(rows=factor, gradients_s=factor)
        how = f"{factor} times the batch (accumulate={factor})"
        batches.append((how, larger, master))
    density = measured.alone.density
    how = f"a density of {density / SPARSER:.0e} instead of {density:.0e}"
    # Fewer entries save bytes and no time.
    sparser = measured.scaled(update_bytes=1 / SPARSER)
    yield from (gathering, batches, [(how, sparser, master)])
