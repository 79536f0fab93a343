"""Guarded calls, the choice of a client, and checks of installed versions.

`guarded` and `settle` turn exceptions into values and contain the only broad excepts of
daskdl. All processes of a cluster need the same daskdl and the same minor version of
torch: `check_installed` compares them, and workers that join later are checked when
they arrive.
"""

import ast
import asyncio
import contextlib
import importlib
import logging
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import dask
import dask.config
import distributed
import numpy
import torch
from distributed import Client, LocalCluster, Worker, default_client
from distributed.core import Status
from distributed.deploy import Cluster
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.threadpoolexecutor import rejoin
from distributed.threadpoolexecutor import thread_state as pool_state
from distributed.worker import secede, thread_state

from daskdl.config import VERSION, Timeouts
from daskdl.errors import OptionError, RunError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(action: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """Call a function; if it raises an Exception, return the result of `failed`."""
    try:
        return action()
    except Exception as error:
        return failed(error)


def text_of(error: BaseException, *, named: bool = True) -> str:
    """Return an exception's message; user code may compute the message.

    Args:
        error: Any exception.
        named: Whether the message begins with the name of the class.

    Returns:
        The message; if ``str(error)`` raises, the name of the class and the reason.
    """
    name = type(error).__name__
    return guarded(
        lambda: f"{name}: {error}" if named else str(error),
        lambda cause: f"{name} (its __str__ raises {type(cause).__name__})",
    )


def settle(future: "Future[T]", action: Callable[[], T]) -> None:
    """Call a function, and store its result or exception in a future.

    BaseExceptions such as SystemExit are stored, too: otherwise a wait for the future
    of a thread would never end.

    Args:
        future: A pending future. The caller should not keep a reference: the traceback
            refers to the caller's frame, which would form a reference cycle.
        action: Called once.
    """
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, action  # the traceback refers to this frame: break the cycle


# A terminal sends SIGINT to the workers too; the client shuts them down instead.
LEAVE_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
REMEDY = (
    "install the same daskdl and the same minor version of torch in the environment of "
    "the scheduler and of every worker, and restart them"
)
MAX_NAMED = 8  # most addresses, and most kinds of problems, in a message

CLIENT_VERSIONS = f"the client has daskdl {VERSION} and torch {torch.__version__}"

Versions = Mapping[str, str]  # of "daskdl" and "torch", and the "error"; "": none


@contextlib.contextmanager
def client_or_process(
    client: Client | Literal[False] | None, *, announces: bool = False
) -> Iterator[Client | Literal[False]]:
    """Yield a synchronous client, or False; close a cluster started here on exit.

    Args:
        client: As passed by the user; None: the default client, or a new cluster.
        announces: Whether to print the address of a new cluster's dashboard.
    """
    check_client(client)
    usable = running_client() if client is None else client
    if usable is None:
        check_main_guard("client=False trains and predicts in this process instead")
        with local_client() as started:
            logger.info("started %s, as no client was passed", started.cluster)
            page = dashboard_page(started)
            if announces and page:
                sys.stderr.write(f"dashboard: {page}\n")
            yield started
        return
    if usable is not False:
        if usable.status in ("closed", "closing"):
            raise OptionError(
                f"client must be running, got one with status {usable.status!r}; "
                "create a new one, Client(...)"
            )
        if usable.asynchronous or usable.status != "running":
            raise OptionError(
                "client must be synchronous and running, got one with status "
                f"{usable.status!r} and asynchronous={usable.asynchronous}; use "
                "Client(...) without asynchronous=True"
            )
    with contextlib.nullcontext() if usable is False else _slot_freed():
        yield usable


@contextlib.contextmanager
def _slot_freed() -> Iterator[None]:
    """Free the slot of the current Dask task, as `dask.compute` does.

    The task waits for other tasks, which may need the only thread of the same worker.
    """
    in_task = getattr(thread_state, "key", None) is not None
    if not in_task or not getattr(pool_state, "proceed", False):
        yield  # not in a task, or in one that has seceded
        return
    secede()
    try:
        yield
    finally:
        rejoin()


def check_client(client: Any) -> None:
    """Refuse what is neither a client nor None nor False, such as an address.

    daskdl opens no connection by itself: it could not tell when to close it.
    """
    if client is None or client is False or isinstance(client, Client):
        return
    remedy = ""
    if isinstance(client, str):
        remedy = f"; write Client({client!r})"
    elif isinstance(client, Cluster):
        remedy = "; write Client(cluster)"
    raise OptionError(
        f"client must be a distributed.Client, None or False, got {client!r}{remedy}"
    )


def check_main_guard(alternative: str) -> None:
    """Refuse to start processes from the top level of a script without a guard.

    Each new process imports the script, and would start processes again. A script that
    compares `__name__` before its current line is accepted, and so is code that new
    processes do not import: from ``python -c``, a prompt or a notebook, from a
    package's ``__main__.py`` run with ``-m``, or frozen.

    Args:
        alternative: What works without a guard, for the message.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    name = getattr(getattr(main, "__spec__", None), "name", "")
    setting = "distributed.worker.multiprocessing-method"
    if (
        path is None
        or name.rpartition(".")[2] == "__main__"
        or getattr(sys, "frozen", False)
        or dask.config.get(setting) == "fork"
    ):
        return
    frame = sys._getframe()
    while not (
        frame.f_code.co_name == "<module>"
        and frame.f_globals is vars(main)
        and Path(frame.f_code.co_filename).absolute() == Path(path).absolute()
    ):
        if frame.f_back is None:
            return
        frame = frame.f_back
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):  # such as a notebook, or compiled code
        return
    compared = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.Match) and node.lineno <= frame.f_lineno
    )
    if not any("__name__" in ast.unparse(node) for node in compared):
        raise OptionError(
            f"{path}, line {frame.f_lineno}, starts worker processes, which import the "
            'script, outside of if __name__ == "__main__":; move this code below such '
            f"a line; {alternative}"
        )


@contextlib.contextmanager
def local_client(workers: int | None = None) -> Iterator[Client]:
    """Start worker processes on this machine; None: as many as Dask chooses."""
    preload = dask.config.get("distributed.scheduler.preload")
    with (
        LocalCluster(
            n_workers=workers,
            dashboard_address=":0",
            scheduler_kwargs={"preload": [*preload, "daskdl.channel.scheduler"]},
            preload=[*dask.config.get("distributed.worker.preload"), LEAVE_CTRL_C],
        ) as cluster,
        Client(cluster, set_as_default=False, direct_to_workers=True) as client,
    ):
        yield client


def dashboard_page(client: Client) -> str:
    """Return the address of daskdl's page on a cluster's dashboard; empty: none."""
    link = client.dashboard_link
    return link and f"{link.removesuffix('/status')}/daskdl"


def check_outlives(client: Any) -> None:
    """Refuse lazy outputs if their cluster would close before they are computed."""
    if client is None and running_client() is None:
        raise OptionError(
            "lazy outputs need a client, because a cluster started for this call would "
            "be closed before they are computed: pass client=, or client=False to "
            "compute them in this process"
        )


def running_client() -> Client | None:
    """Return the default client; None if there is none."""
    try:
        return default_client()
    except ValueError:  # there is no default client
        return None


def check_installed(client: Client) -> None:
    """Import daskdl on the scheduler and all workers, and compare versions.

    A process without daskdl could not unpickle daskdl's objects. The import takes
    seconds; it runs in a thread of each process, so the event loop stays responsive.
    """
    with installed_meanwhile(client):
        pass


Waiting = Callable[[int, int], object]


@contextlib.contextmanager
def installed_meanwhile(
    client: Client, waiting: Waiting | None = None
) -> Iterator[None]:
    """Check the processes of the cluster while the block runs on the client.

    An exception in the block cancels the check.

    Args:
        client: Client of the cluster.
        waiting: Called on the event loop while workers import, with the number of these
            workers and of all.
    """
    loop = client.loop.asyncio_loop
    answering = asyncio.run_coroutine_threadsafe(_answers(client, waiting), loop)
    try:
        yield
        answers = answering.result()
    finally:
        answering.cancel()
    processes: dict[str, list[str]] = {}  # by problem
    for process, answer in answers.items():
        if isinstance(answer, OSError):
            logger.info("%s is leaving: %s", process, answer)
        elif problem := mismatch(answer):
            processes.setdefault(problem, []).append(process)
    if processes:
        lines = [f"{_and_more(names)}: {why}" for why, names in processes.items()]
        raise RunError(
            f"{CLIENT_VERSIONS}; on the cluster:\n  "
            + "\n  ".join(lines[:MAX_NAMED])
            + f"\n{REMEDY}"
        )


def versions_of(client: Client) -> dict[str, Any]:
    """Return the versions on the scheduler and each worker, or errors, by process."""
    answers: dict[str, Any] = client.sync(_answers, client)
    return answers


REPORT_S = 0.5  # between two reports of workers that import


async def _answers(client: Client, report: Waiting | None = None) -> dict[str, Any]:
    bound = Timeouts.from_config().bound("join", "request")
    scheduler = f"the scheduler, {client.scheduler.address}"
    asked = {asyncio.ensure_future(client.nthreads()): scheduler}
    try:
        done, waiting = await asyncio.wait(asked, timeout=bound.seconds)
        if done:
            (workers,) = (task.result() for task in done)
            asking = {scheduler: client.run_on_scheduler(version_finder())}
            for address in sorted(workers):
                asking[f"worker {address}"] = client.run(
                    version_finder(), workers=[address], on_error="return"
                )
            asked = {asyncio.ensure_future(r): where for where, r in asking.items()}
            deadline = time.monotonic() + bound.seconds
            waiting = set(asked)
            while waiting and (left_s := deadline - time.monotonic()) > 0:
                _, waiting = await asyncio.wait(asked, timeout=min(left_s, REPORT_S))
                slow = sum(asked[task] != scheduler for task in waiting)
                if report is not None and slow:
                    report(slow, len(workers))
    finally:
        for task in asked:
            task.cancel()
    if waiting:
        # A process that still imports must not get tasks that need the same import.
        silent = _and_more(sorted(asked[task] for task in waiting))
        raise WaitTimeoutError(
            f"{silent}: no answer within {bound} about the versions of daskdl and "
            "torch; the process hangs, or its imports are slow"
        )
    answers: dict[str, Any] = {}
    for task, where in asked.items():
        answer = task.result()
        answers[where] = answer if where == scheduler else next(iter(answer.values()))
    return answers


def version_finder() -> Callable[[], Awaitable[Versions]]:
    """Return a function that finds the versions in a process that may lack daskdl.

    An inner function is pickled by value, not by module and name. The scheduler imports
    the same modules as a worker, since Dask unpickles tasks there, on the event loop.
    """

    def find() -> Versions:
        versions = {"daskdl": "", "torch": "", "error": ""}
        try:
            versions["daskdl"] = importlib.import_module("daskdl.config").VERSION
            versions["torch"] = str(importlib.import_module("torch").__version__)
            for name in ("dask_backend", "gradient_sharing", "parameter_averaging"):
                importlib.import_module(f"daskdl.training.{name}")
        except ImportError as error:
            versions["error"] = f"{type(error).__name__}: {error}"
        return versions

    async def find_in_a_thread() -> Versions:
        return await asyncio.to_thread(find)

    return find_in_a_thread


def arrival_plugin(name: str) -> WorkerPlugin:
    """Return a plugin that sets up present and future workers for a run.

    The plugin is pickled by value, so that a worker without daskdl can load it. It
    imports daskdl in a thread, installs the channel plugin if the versions match, and
    reports the versions to the scheduler.
    """
    find, version = version_finder(), VERSION

    class Arrival(WorkerPlugin):  # type: ignore[misc]  # Dask is untyped
        idempotent = True

        def __init__(self) -> None:
            self.name = name

        async def setup(self, worker: Worker) -> None:
            versions = await find()
            if versions["daskdl"] == version and not versions["error"]:
                importlib.import_module("daskdl.channel.worker").set_up(worker)
            await worker.scheduler.daskdl_arrive(
                worker=worker.address, versions=versions
            )

        async def teardown(self, worker: Worker) -> None:
            # Dask also tears a plugin down before setting it up again, which can
            # happen on a new worker; the worker's replicas must continue.
            end = worker.extensions.get(name)
            if end is not None and worker.status is not Status.running:
                await end.teardown(worker)

    return Arrival()


def versions() -> dict[str, str]:
    """Return versions of packages and of the platform, by name, for reports."""
    return {
        "daskdl": VERSION,
        "python": platform.python_version(),
        **{
            module.__name__: str(module.__version__)
            for module in (torch, dask, distributed, numpy)
        },
        "platform": platform.platform(),
    }


def mismatch(versions: Versions | Exception) -> str:
    """Return the reason why a process cannot take part in a run; empty if it can."""
    if isinstance(versions, Exception):
        return f"{type(versions).__name__}: {versions}"
    differing = []
    if versions["daskdl"] not in ("", VERSION):
        differing.append(f"daskdl {versions['daskdl']}")
    if versions["torch"] and _minor(versions["torch"]) != _minor(torch.__version__):
        differing.append(f"torch {versions['torch']}")
    return " and ".join(differing) or versions["error"]


def _minor(version: str) -> str:
    """Return the minor version, which must match; patch and build may differ.

    Example:
        >>> _minor("2.8.1+cu128")
        '2.8'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def _and_more(names: list[str]) -> str:
    hidden = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")
