"""The command line, ``daskdl``: commands that use the public interface.

Errors are messages on standard error; the exit code is 2 if the command is wrong, and 1
if a run failed. Importing torch takes seconds, so only the commands that need torch
import it; ``--help`` does not.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import math
import operator
import os
import re
import signal
import statistics
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from typing_extensions import override

import daskdl
from daskdl.config import VERSION
from daskdl.errors import (
    DaskDLError,
    OptionError,
    count_of,
    epoch_of,
    keep_internal_frames,
)

if TYPE_CHECKING:
    from distributed import Client

USAGE, RUN, INTERRUPTED = 2, 1, 130  # exit codes

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class FailedError(click.ClickException):
    """Ends a command with a message, without a traceback."""

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click has a class variable


class Command(click.Command):
    """A command whose expected errors are printed as messages."""

    @override
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (DaskDLError, OSError) as error:  # a TimeoutError is an OSError
            if ctx.find_root().params["traceback"]:
                raise
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            usage = isinstance(error, OptionError)
            message = f"{error or type(error).__name__}{notes}"
            raise FailedError(message, USAGE if usage else RUN) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


class Setting(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.2
    """``NAME=VALUE``, where the value is JSON or, if that fails, text.

    Example:
        >>> Setting().convert("lr=1e-3", None, None)
        ('lr', 0.001)
    """

    name = "NAME=VALUE"

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        name, equals, text = value.partition("=")
        if not equals or not name:
            self.fail(f"{value!r} is not of the form NAME=VALUE", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


# ---- shared options

IS_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine decorators into one."""
    return lambda function: functools.reduce(
        lambda command, option: option(command), reversed(options), function
    )


def _settings(option: str, name: str, help: str) -> Callable[[F], F]:
    """Return an option that may be repeated, for the items of a dict."""
    return click.option(
        option,
        name,
        type=Setting(),
        multiple=True,
        callback=lambda context, parameter, items: dict(items),
        help=help,
    )


_factory = _options(
    click.argument("factory", metavar="MODULE:FACTORY"),
    _settings(
        "--arg", "arguments", "Argument of the factory, such as lr=0.1; repeatable."
    ),
)
_storage = _settings(
    "--storage-option",
    "storage",
    "fsspec option for all URLs, such as anon=true; repeatable.",
)
_data = _options(
    click.option(
        "--data",
        required=True,
        multiple=True,
        metavar="URL",
        help="A folder, or files and patterns such as s3://bucket/train/*.npz; "
        "repeatable. Or MODULE:FUNCTION, which returns any data that fit takes: "
        "(X, y), or both in one object.",
    ),
    click.option(
        "--loader",
        metavar="MODULE:NAME",
        help="Reads (x, y) from a file: a function of the open file, or a reader such "
        "as daskdl.data.Csv(label=...). Default: chosen by the files' extension.",
    ),
    _storage,
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Rows per batch of each replica.",
    ),
)


CLUSTERS = "scheduler", "slurm", "local"  # names of options


def _only_one(context: click.Context, parameter: click.Parameter, value: T) -> T:
    """Refuse a second option that chooses a cluster, before anything is read."""
    former = [n for n in CLUSTERS if n != parameter.name and context.params.get(n)]
    if value is not None and former:
        raise FailedError("use only one of --scheduler, --slurm and --local")
    return value


_cluster = _options(
    click.option(
        "--scheduler",
        metavar="ADDRESS",
        callback=_only_one,
        help="Use the cluster of this scheduler.",
    ),
    click.option(
        "--slurm",
        type=click.IntRange(min=1),
        callback=_only_one,
        metavar="N",
        help="Submit N SLURM jobs, and replace jobs that end. Needs dask-jobqueue, "
        "whose configuration sets the cores and the memory of a job.",
    ),
    click.option(
        "--local",
        type=click.IntRange(min=1),
        callback=_only_one,
        metavar="N",
        help="Start N worker processes on this machine. Default without these three "
        "options: the trainer's client, or processes for all cores.",
    ),
)


def _imported(reference: str) -> Any:
    """Import ``module:name``; the current folder comes first, as for ``python -m``."""
    from daskdl.util import guarded

    if not IS_NAME.fullmatch(reference):
        raise FailedError(f"{reference!r} is not of the form MODULE:NAME")
    module_name, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

    def failed(error: Exception) -> NoReturn:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module_name}.".startswith(f"{missing}."):
            where = "in this folder or among the installed packages"
            raise FailedError(f"no module {module_name!r} {where}") from error
        raise FailedError(f"importing {module_name!r} {_raised(error)}") from error

    module = guarded(lambda: importlib.import_module(module_name), failed)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        raise FailedError(f"module {module_name!r} has no {name!r}") from error


@contextlib.contextmanager
def _pickled_by_value(references: Iterable[str | None]) -> Iterator[None]:
    """Context manager: pickle single-file modules by value, for workers without them.

    Tracebacks then show no source lines of these modules.
    """
    import cloudpickle

    names = {r.partition(":")[0] for r in references if r and IS_NAME.fullmatch(r)}
    modules = [sys.modules[name] for name in names if "." not in name]
    files = [module for module in modules if not hasattr(module, "__path__")]
    for module in files:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in files:
            cloudpickle.unregister_pickle_by_value(module)


def _called(reference: str, arguments: Mapping[str, Any]) -> Any:
    """Import and call a function of the user."""
    from daskdl.util import guarded

    function = _imported(reference)
    if not callable(function):
        kind = type(function).__name__
        raise FailedError(f"{reference} must be a function, got a {kind}")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise FailedError(f"{reference} cannot be called: {error}") from error

    def failed(error: Exception) -> NoReturn:
        if isinstance(error, DaskDLError):
            raise error
        raise FailedError(f"{reference} {_raised(error)}", RUN) from error

    return guarded(lambda: function(**arguments), failed)


def _raised(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename}, line {last.lineno}"
    return f"raised {type(error).__name__}: {error} ({where})"


def _trainer(factory: str, arguments: Mapping[str, Any]) -> "daskdl.Trainer":
    trainer = _called(factory, arguments)
    if not isinstance(trainer, daskdl.Trainer):
        kind = type(trainer).__name__
        raise FailedError(f"{factory} must return a daskdl.Trainer, got a {kind}")
    return trainer


def _read(
    data: Sequence[str], loader: str | None, storage: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the leading arguments of `fit`: X, or X and y."""
    from daskdl.data import files

    if len(data) == 1 and IS_NAME.fullmatch(data[0]):
        if loader is not None:
            raise FailedError("--loader needs URLs, but --data is a function")
        X = _called(data[0], {})
        return X if isinstance(X, tuple) and len(X) == 2 else (X,)
    read = None if loader is None else _imported(loader)
    urls = data[0] if len(data) == 1 else list(data)  # a folder must be the only URL
    return (files(urls, read, storage_options=storage or None),)


@contextlib.contextmanager
def _client(
    scheduler: str | None, slurm: int | None, local: int | None
) -> "Iterator[Client | None]":
    """Connect to a cluster, or start one; yield None without any of the options."""
    from distributed import Client

    from daskdl.util import dashboard_page, local_client

    if local is not None:
        with local_client(local) as client:
            if page := dashboard_page(client):
                click.echo(f"dashboard: {page}", err=True)
            yield client
    elif slurm is not None:
        with _slurm_cluster(slurm) as cluster, Client(cluster) as client:
            if page := dashboard_page(client):
                click.echo(f"dashboard: {page}", err=True)
            click.echo(f"Waiting for the first of {slurm} jobs.", err=True)
            client.wait_for_workers(1)
            yield client
    elif scheduler is not None:
        try:
            connected = Client(scheduler, set_as_default=False)
        except (OSError, ValueError) as error:
            why = f"cannot connect to the scheduler at {scheduler!r}: {error}"
            raise FailedError(why, RUN) from error
        with connected as client:
            yield client
    else:
        yield None


def _slurm_cluster(jobs: int) -> Any:
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        remedy = "pip install 'daskdl[jobqueue]'"
        raise FailedError(f"--slurm needs dask-jobqueue: {remedy}") from error
    try:
        cluster = SLURMCluster()
    except ValueError as error:
        where = "Dask's configuration, jobqueue.slurm"
        raise FailedError(f"{error} Set it in {where}.") from error
    # Unlike `scale`, `adapt` submits a new job when the time of a job is over.
    cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)
    return cluster


# ---- commands


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show the traceback of an error.")
@click.version_option(VERSION, prog_name="daskdl")
def cli(traceback: bool) -> None:
    """Asynchronous SGD for PyTorch models on a Dask cluster."""
    keep_internal_frames(traceback)


@cli.command(cls=Command)
@_factory
@_data
@click.option(
    "--validation",
    multiple=True,
    metavar="URL",
    help="Data to score the model on after each epoch, in the forms of --data.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Passes over the data, including those before a checkpoint.",
)
@_cluster
@click.option("--checkpoint", metavar="URL", help="Write checkpoints to this folder.")
@click.option(
    "--every",
    help="When to write checkpoints: epoch, 500 steps, 10 minutes, ...  "
    "[default: epoch]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest checkpoint; start from scratch if there is none.",
)
@click.option("--name", help="Name of the run, on the dashboard and in its report.")
@click.option("--save", metavar="URL", help="Save the trainer to this folder.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True),
    help="Write an HTML report to this file, even if the run fails.",
)
def train(
    factory: str,
    arguments: Mapping[str, Any],
    data: Sequence[str],
    loader: str | None,
    storage: Mapping[str, Any],
    batch_size: int,
    validation: Sequence[str],
    epochs: int,
    scheduler: str | None,
    slurm: int | None,
    local: int | None,
    checkpoint: str | None,
    every: str | None,
    resume: bool,
    name: str | None,
    save: str | None,
    report: str | None,
) -> None:
    """Train the daskdl.Trainer that a function returns.

    MODULE is imported from this folder or from the installed packages. Workers of a
    running cluster do not need MODULE if it is a single file; a package must be
    installed on them.

    \b
    daskdl train nets:digits --data 'digits/*.npz' --epochs 10 --local 4 --save model
    """  # noqa: D301 - click keeps the lines after this mark
    trainer = _trainer(factory, arguments)
    callbacks = [*trainer.callbacks]
    rule = _checkpointing(callbacks, checkpoint, every, storage, resume=resume)
    X = _read(data, loader, storage)
    held_out = _read(validation, loader, storage) if validation else None
    if rule is None and save is None:
        click.echo("Neither --save nor --checkpoint: no model will be kept.", err=True)
    added: list[daskdl.Callback] = [] if rule is None or rule in callbacks else [rule]
    if trainer.progress is None and not sys.stderr.isatty():
        added.append(daskdl.PrintProgress())
    with _client(scheduler, slurm, local) as client, contextlib.ExitStack() as ending:
        if client is not None:
            trainer.client = client
        if scheduler is not None:
            references = [factory, loader, *data, *validation]
            ending.enter_context(_pickled_by_value(references))
        if report is not None:
            ending.push(functools.partial(_report, trainer, report))
        trainer.callbacks = [*callbacks, *added]
        try:
            trainer.fit(
                *X,
                epochs=epochs,
                batch_size=batch_size,
                validation=held_out[0] if held_out and not held_out[1:] else held_out,
                resume=resume or None,
                name=name,
            )
        except KeyboardInterrupt:
            click.echo(_where_to_resume(rule), err=True)
            raise
        trainer.callbacks = callbacks  # the save excludes callbacks of this command
        if save is not None:
            trainer.save(save, storage_options=storage or None)
            click.echo(f"saved in {save}")


def _report(
    trainer: "daskdl.Trainer",
    path: str,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: object,
) -> None:
    """Write a report; if that fails after the run failed, keep the run's error."""
    if not hasattr(trainer, "history_"):  # the run failed before training
        return
    try:
        trainer.history_.report(path)
    except OSError as failure:
        if error is None:
            raise
        click.echo(f"The report was not written: {failure}", err=True)
    else:
        click.echo(f"report in {path}")


def _checkpointing(
    callbacks: "Sequence[daskdl.Callback]",
    url: str | None,
    every: str | None,
    storage_options: Mapping[str, Any],
    *,
    resume: bool,
) -> "daskdl.Checkpoint | None":
    """Return a `Checkpoint` for a URL; without a URL, that of the trainer, if any."""
    existing = next((c for c in callbacks if isinstance(c, daskdl.Checkpoint)), None)
    if url is None:
        if every is not None:
            raise FailedError("--every needs --checkpoint")
        if resume and existing is None:
            raise FailedError("--resume needs --checkpoint")
        return existing
    if existing is not None:
        raise FailedError(
            "--checkpoint cannot be used: the factory's trainer has a Checkpoint"
        )
    return daskdl.Checkpoint(
        url,
        every=int(every) if every and every.isdigit() else every or "epoch",
        storage_options=storage_options or None,
    )


def _where_to_resume(rule: "daskdl.Checkpoint | None") -> str:
    from daskdl.saving.checkpoints import Series

    if rule is None:
        return "This run has no checkpoint, because --checkpoint was not used."
    newest = Series.at(rule.url, rule.storage_options).newest()
    if newest is None:
        return f"{rule.url} has no complete checkpoint."
    return (
        f"The last checkpoint is {newest.store.url}; continue with the same command "
        "and --resume."
    )


@cli.command(cls=Command)
@_factory
@_data
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Largest number of workers.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GBIT/S",
    help="Bandwidth of each machine's link. Default: all workers are on this machine.",
)
@click.option(
    "--latency",
    type=click.FloatRange(min=0),
    metavar="MS",
    help="One-way latency between machines.  [default: 0.5]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of each worker. Default: as in this process.",
)
def plan(
    factory: str,
    arguments: Mapping[str, Any],
    data: Sequence[str],
    loader: str | None,
    storage: Mapping[str, Any],
    batch_size: int,
    workers: int,
    bandwidth: float | None,
    latency: float | None,
    threads: int | None,
) -> None:
    """Predict how many workers pay off.

    Takes a few seconds on this machine.

    \b
    daskdl plan nets:digits --data 'digits/*.npz' --workers 16 --bandwidth 1
    """  # noqa: D301 - click keeps the lines after this mark
    from daskdl.data.checks import optimizer_function

    if latency is not None and bandwidth is None:
        raise FailedError("--latency needs --bandwidth")
    trainer = _trainer(factory, arguments)
    if trainer.loss is None:
        raise FailedError("plan needs a trainer with loss=, got one without")
    if not isinstance(trainer.master, daskdl.GradientSharing):
        kind = type(trainer.master).__name__
        raise FailedError(f"plan needs master=GradientSharing(...), got a {kind}")
    X = _read(data, loader, storage)
    link = None
    if bandwidth is not None:
        latency_s = (0.5 if latency is None else latency) / 1e3
        link = daskdl.Network(1e9 * bandwidth, latency_s)
    prediction = daskdl.plan(
        trainer.model,
        _first_batch(X, batch_size, trainer.transform),
        workers,
        link,
        loss=trainer.loss,
        optimizer=optimizer_function(trainer.optimizer, trainer.lr),
        master=trainer.master,
        threads=threads,
    )
    click.echo(prediction)


def _first_batch(X: tuple[Any, ...], size: int, transform: Any) -> Any:
    """Load the first rows of the data, like a replica for a step."""
    from daskdl.data import batching
    from daskdl.data.inputs import source_of

    source = source_of(*X)
    chunks = (
        batching.all_rows(rows)
        for part in range(source.parts)
        for rows in source.stream(part, size)
    )
    for batch in batching.batches(chunks, size):
        return batch if transform is None else transform(batch)
    raise FailedError("--data has no rows")


@cli.command(cls=Command)
@click.argument("run", metavar="URL")
@click.argument("file", type=click.Path(dir_okay=False, writable=True))
@_storage
def report(run: str, file: str, storage: Mapping[str, Any]) -> None:
    """Write an HTML report of a saved trainer's last fit.

    URL is the folder of the save.
    """
    from daskdl.training.trainer_state import load_history

    load_history(run, storage or None).report(file)


@cli.command(cls=Command)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Scheduler of the cluster to check. Default: a cluster on this machine.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Length of the trial fit.",
)
def check(scheduler: str | None, seconds: float) -> None:
    """Check a cluster: one verdict for each worker.

    Compares versions, lists threads, memory and devices, measures bandwidth while all
    workers send at the same time, and trains a small network. The exit code is 1 if a
    worker cannot take part.
    """
    from daskdl import util

    with (
        _client(scheduler, None, None) as connected,
        contextlib.ExitStack() as stack,
    ):
        client = connected or stack.enter_context(util.local_client())
        click.echo(util.CLIENT_VERSIONS)
        unusable = {
            process: problem
            for process, answer in util.versions_of(client).items()
            if (problem := util.mismatch(answer))
        }
        workers = [f"worker {address}" for address in sorted(client.nthreads())]
        if not workers:
            raise FailedError("the cluster has no workers", RUN)
        details, unreachable = _inspected(client, {*workers} - {*unusable})
        unusable |= unreachable
        steps_ms = {} if unusable else _trial_fit(client, seconds)
        if not unusable:
            idle = "it took no part in the trial fit; its log may say why"
            unusable = dict.fromkeys({*workers} - {*steps_ms}, idle)
    for process, problem in sorted(unusable.items()):
        click.echo(f"{process}: unusable: {problem}")
    median_ms = statistics.median(steps_ms.values()) if steps_ms else math.nan
    for worker in workers:
        if worker in unusable:
            continue
        verdict, step_ms = "not tried, as others are unusable", steps_ms.get(worker)
        if step_ms is not None:
            details[worker].append(f"{step_ms:.1f} ms a step")
            times = step_ms / median_ms
            slow = f"slow: its steps take {times:.1f} times the median"
            verdict = slow if times > SLOW else "ok"
        click.echo(f"{worker}: {verdict} ({', '.join(details[worker])})")
    if unusable:
        sys.exit(RUN)


SLOW = 2.0  # times the median duration of a step; replicas wait for a slower replica


def _inspected(
    client: "Client", names: Collection[str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return details of workers, and why workers cannot reach a peer, both by name.

    Each worker sends to the next worker, all at the same time.
    """
    from daskdl.config import Timeouts
    from daskdl.data.distribute import answers_of

    workers = sorted(name.removeprefix("worker ") for name in names)
    peers = dict(zip(workers, [*workers[1:], *workers[:1]], strict=True))
    inspect_worker = functools.partial(_inspect_worker, peers)
    bound = Timeouts.from_config().bound("request")
    answers = answers_of(client, workers, inspect_worker, bound, "how fast it sends")
    return (
        {f"worker {address}": details for address, (details, _) in answers.items()},
        {f"worker {address}": why for address, (_, why) in answers.items() if why},
    )


MESSAGE_SIZE, SENDING_TIME = "4 MiB", "1 s"
REACHED_WITHIN_S = 15.0


async def _inspect_worker(
    peers: Mapping[str, str], dask_worker: Any
) -> tuple[list[str], str]:
    """Return details of this worker, and why it cannot reach its peer, or ""."""
    import torch
    from dask.utils import format_bytes
    from distributed.worker import benchmark_network

    memory, count = dask_worker.memory_manager.memory_limit, torch.cuda.device_count()
    threads = dask_worker.state.nthreads
    details = [
        "1 thread" if threads == 1 else f"{threads} threads",
        format_bytes(memory) if memory else "no memory limit",
        ", ".join(map(torch.cuda.get_device_name, range(count))) or "no CUDA device",
    ]
    peer, unreachable = peers[dask_worker.address], ""
    if peer != dask_worker.address:
        try:
            async with asyncio.timeout(REACHED_WITHIN_S):
                rates = await benchmark_network(
                    peer, dask_worker.rpc, [MESSAGE_SIZE], SENDING_TIME
                )
            details.append(f"sends {8e-9 * rates[MESSAGE_SIZE]:.2f} Gbit/s")
        except OSError as error:  # a TimeoutError is an OSError
            unreachable = f"it cannot reach {peer}: {error or type(error).__name__}"
    return details, unreachable


def _trial_fit(client: "Client", seconds: float) -> dict[str, float]:
    """Train a small network; return the milliseconds per step, by name of worker."""
    import torch
    from torch import nn

    workers: dict[int, str] = {}  # addresses by replica

    class NoteWorkers(daskdl.Callback):
        def on_epoch_end(self, row: Mapping[str, Any]) -> None:
            for run in _runs(client) if len(workers) < row["replicas"] else ():
                if run["client"] == client.id:
                    for replica in run["replicas"]:
                        workers[replica["replica"]] = replica["worker"]

    rows = 32 * TRIAL_STEPS * len(client.nthreads())
    X = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    limit = daskdl.EarlyStopping("loss", max_seconds=seconds, restore_best=False)
    history = daskdl.Trainer(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        client=client,
        callbacks=[limit, NoteWorkers()],
        progress=False,
        telemetry_every=1,
    ).fit(X, X[:, :10].argmax(dim=1), epochs=10**6)
    columns = map(history.steps.column, ("replica", "step_s", "wait_s"))
    steps_ms: dict[str, list[float]] = {}
    for replica, step_s, wait_s in zip(*columns, strict=True):
        if replica in workers:
            name = f"worker {workers[replica]}"
            steps_ms.setdefault(name, []).append(1e3 * (step_s - wait_s))
    return {name: statistics.median(steps) for name, steps in steps_ms.items()}


TRIAL_STEPS = 64  # of each worker in an epoch, which takes tens of milliseconds


@cli.command(cls=Command)
@click.option(
    "--scheduler", metavar="ADDRESS", required=True, help="Scheduler of the cluster."
)
def doctor(scheduler: str) -> None:
    """Show the activity of each replica, for a run that seems to hang.

    The scheduler asks the workers, without affecting the run.
    """
    with _client(scheduler, None, None) as client:
        assert client is not None
        runs = _runs(client)
    if not runs:
        click.echo(f"no run of daskdl on {scheduler}")
    for run in runs:
        replicas = {
            replica["replica"]: replica
            for replica in run["replicas"]
            if replica["phase"] != "gone"
        }
        click.echo(
            f"run {run['run']}: {epoch_of(run['epoch'], run['epochs'])}, "
            f"{run['rows']:,} of its rows left, {count_of(len(replicas), 'replica')}"
        )
        if run["stopped"] is not None:
            click.echo(f"  stopped: {run['stopped']}")
        present = [*replicas.values()]
        awaited = {
            number: _awaited_by(replica, present, run)
            for number, replica in replicas.items()
        }
        for number, replica in replicas.items():
            activity = _activity(replica, awaited[number], run, len(replicas))
            click.echo(f"  replica {number} on {replica['worker']}: {activity}")
        blocking = set().union(*awaited.values())
        roots = sorted(number for number in blocking if not awaited.get(number))
        if roots:
            click.echo(f"  the others wait for: {_listed(roots)}")


def _runs(client: "Client") -> list[dict[str, Any]]:
    """Ask the plugin on the scheduler for a description of each run."""
    from daskdl.channel.protocol import DESCRIBE
    from daskdl.channel.transport import awaited
    from daskdl.config import Timeouts

    bound = Timeouts.from_config().bound("request")
    where = f"the scheduler at {client.scheduler.address}"

    async def describe() -> Any:
        # A lambda is pickled by value: the scheduler may lack daskdl.
        has_plugin = await client.run_on_scheduler(
            lambda dask_scheduler: DESCRIBE in dask_scheduler.handlers
        )
        return (
            (await getattr(client.scheduler, DESCRIBE)())["runs"] if has_plugin else ()
        )

    def check() -> None:
        if client.status != "running":  # else Dask would try to connect again
            raise ConnectionError("the connection is closed")

    async def ask() -> Any:
        return await awaited(describe(), bound.seconds, check)

    try:
        runs: list[dict[str, Any]] = client.sync(ask)
    except OSError as error:  # a TimeoutError is an OSError
        if isinstance(error, TimeoutError):
            late = f"{where} did not answer within {bound}"
            raise daskdl.WaitTimeoutError(late) from error
        raise daskdl.ChannelError(f"{where} was lost: {error}") from error
    return runs


WAITS = {
    "staleness": "other replicas to catch up (max_staleness)",
    "room": "room in its outbox",
    "lease": "rows to train on",
    "gather": "other replicas at a barrier",
    "fetch": "the sums of other replicas",
    "flush": "its updates to be sent",
    "updates": "updates in flight",
    "checkpoint": "a checkpoint to be written or read",
    "data": "a part of the data to be loaded",
    "missing": "a lost part of the data to be computed again",
    "repair": "missing updates that other replicas have",
    "join": "the start of all replicas",
    "snapshot": "the state of another replica",
    "activate": "the end of a barrier, to join",
}


Described = Mapping[str, Any]  # a run or a replica, see `LiveRun.describe`


def _activity(replica: Described, awaited: set[int], run: Described, count: int) -> str:
    """Describe what a replica does or waits for."""
    step = f"step {replica['steps']}"
    if replica["phase"] == "starting":
        return "has not started; is its worker busy with other tasks?"
    if replica["doing"] is None:
        return (
            f"{step}, its worker does not answer; last heartbeat "
            f"{replica['silent_s']:.1f} s ago, lost after {run['silence_s']:g} s"
        )
    cause, waited_s, stack, module = replica["doing"]
    if not cause:
        doing = f"imports {module}" if module else f"computes in {_place(stack)}"
        return f"{step}, {doing}"
    whom = f": {_listed(sorted(awaited))}" if awaited else ""
    if cause == "lease" and count < run["min_replicas"]:
        whom = f": there are fewer than min_replicas={run['min_replicas']}"
    return f"{step}, waits {waited_s:.1f} s for {WAITS[cause]}{whom}"


def _awaited_by(
    waiting: Described, present: Sequence[Described], run: Described
) -> set[int]:
    """Return the replicas that a replica waits for; empty if they are unknown."""
    peers = [replica for replica in present if replica is not waiting]
    match waiting["doing"] and waiting["doing"][0]:
        case "staleness":
            training = [peer for peer in peers if peer["phase"] == "training"]
            slowest = min((peer["step"] for peer in training), default=0)
            return {peer["replica"] for peer in training if peer["step"] == slowest}
        case "gather" | "activate":
            return {
                replica
                for arrived, awaited in run["barriers"]
                if waiting["replica"] in arrived or waiting["phase"] == "joining"
                for replica in awaited
            }
        case "lease":
            return {peer["replica"] for peer in peers if peer["rows"]}
        case "join":
            return {peer["replica"] for peer in peers if peer["phase"] == "starting"}
    return set()


LIBRARY_FRAME = re.compile(
    r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)"
    r"|-packages[/\\](torch|numpy|distributed)[/\\]"
    r"|[/\\]daskdl[/\\](training|channel|compression|codec|data)[/\\]"
)


def _place(stack: Sequence[str]) -> str:
    """Return the innermost frame of the user's code; if there is none, of any code."""
    frames = [frame.split("\n")[0].strip() for frame in stack]
    users = [frame for frame in frames if not LIBRARY_FRAME.search(frame)]
    return (users or frames or ["an unknown place"])[-1]


def _listed(replicas: Sequence[int]) -> str:
    return ", ".join(f"replica {number}" for number in replicas)


def main() -> None:
    """Run the command line; SIGTERM ends a run like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cli()
