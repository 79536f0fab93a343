"""The choice of a client or a cluster, and checks of its software versions.

Every process of a cluster must have the same daskdl, and torch of the same minor
version; workers that join later are checked when they arrive.
"""

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal

import dask.config
import torch
from distributed import Client, LocalCluster, Worker, default_client
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from daskdl.config import VERSION, Bound, Timeouts
from daskdl.errors import OptionError, RunError, WaitTimeoutError

logger = logging.getLogger(__name__)

# A terminal sends SIGINT to the workers too; the client shuts them down instead.
LEAVE_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
REMEDY = (
    "install the same daskdl, and a torch of the same minor version, in the "
    "environment of the scheduler and of every worker, and start them again"
)
MOST_NAMED = 8  # most addresses, and most kinds of problems, in a message

OWN = f"the client has daskdl {VERSION} and torch {torch.__version__}"

Found = Mapping[str, str]  # versions of "daskdl" and "torch", and "error"; "": none


@contextlib.contextmanager
def client_or_process(
    client: Client | Literal[False] | None,
) -> Iterator[Client | Literal[False]]:
    """Yield a synchronous client, or False; close a cluster started here on exit.

    Args:
        client: A synchronous client. None: the default client if there is one, else a
            :class:`distributed.LocalCluster` with Dask's defaults. False: this process.
    """
    found = _default() if client is None else client
    if found is None:
        with (
            LocalCluster(
                dashboard_address=":0",
                preload=[*dask.config.get("distributed.worker.preload"), LEAVE_CTRL_C],
            ) as cluster,
            Client(cluster, set_as_default=False, direct_to_workers=True) as own,
        ):
            logger.info("no client was given: started %s", cluster)
            yield own
        return
    if found is not False:
        if not isinstance(found, Client):
            raise OptionError(
                f"client must be a distributed.Client, None or False, got {found!r}"
            )
        if found.asynchronous or found.status != "running":
            raise OptionError(
                "client must be synchronous and running, got one with status "
                f"{found.status!r} and asynchronous={found.asynchronous}; use "
                "Client(...) without asynchronous=True"
            )
    yield found


def check_outlives(client: Any) -> None:
    """Refuse lazy outputs if their cluster would close before they are computed."""
    if client is None and _default() is None:
        raise OptionError(
            "client must be given to predict on a dask.array, whose outputs are "
            "computed later: a cluster started for the call would be closed by then"
        )


def _default() -> Client | None:
    try:
        return default_client()
    except ValueError:  # there is no default client
        return None


def check_installed(client: Client) -> None:
    """Import daskdl on the scheduler and all workers, and compare versions.

    A process without daskdl could not unpickle its objects. The import takes seconds
    and runs in a thread of each process, so that the event loop stays responsive.
    """
    bound = Timeouts.from_config().bound("join", "request")
    answers = client.sync(_answers, client, bound)
    places: dict[str, list[str]] = {}  # processes by problem
    for where, answer in answers.items():
        if isinstance(answer, OSError):
            logger.info("%s is leaving: %s", where, answer)
        elif wrong := mismatch(answer):
            places.setdefault(wrong, []).append(where)
    if places:
        lines = [f"{_listed(where)}: {what}" for what, where in places.items()]
        raise RunError(
            f"{OWN}; on the cluster:\n  " + "\n  ".join(lines[:MOST_NAMED]) + "\n"
            f"{REMEDY}"
        )


async def _answers(client: Client, bound: Bound) -> dict[str, Any]:
    """Return the versions on the scheduler and each worker, or errors, by process."""
    scheduler = f"the scheduler, {client.scheduler.address}"
    asked = {asyncio.ensure_future(client.nthreads()): scheduler}
    done, waiting = await asyncio.wait(asked, timeout=bound.seconds)
    if done:
        (workers,) = (task.result() for task in done)
        asking = {scheduler: client.run_on_scheduler(_version_finder())}
        for address in sorted(workers):
            own = client.run(_version_finder(), workers=[address], on_error="return")
            asking[f"worker {address}"] = own
        asked = {asyncio.ensure_future(one): where for where, one in asking.items()}
        _, waiting = await asyncio.wait(asked, timeout=bound.seconds)
    for task in waiting:
        task.cancel()
    if waiting:
        # A process that still imports must not get tasks that need the same import.
        silent = _listed(sorted(asked[task] for task in waiting))
        raise WaitTimeoutError(
            f"no answer within {bound} to which daskdl and torch it has, from "
            f"{silent}: it hangs, or takes longer to import them"
        )
    found: dict[str, Any] = {}
    for task, where in asked.items():
        answer = task.result()
        found[where] = answer if where == scheduler else next(iter(answer.values()))
    return found


def _version_finder() -> Callable[[], Awaitable[Found]]:
    """Make a function that finds the versions in a process that may lack daskdl.

    An inner function is pickled by value, not by module and name. The scheduler imports
    the same modules as a worker, since Dask unpickles tasks there, on the event loop.
    """

    def find() -> Found:
        found = {"daskdl": "", "torch": "", "error": ""}
        try:
            found["daskdl"] = importlib.import_module("daskdl.config").VERSION
            found["torch"] = str(importlib.import_module("torch").__version__)
            for name in ("dask_backend", "gradient_sharing", "parameter_averaging"):
                importlib.import_module(f"daskdl.training.{name}")
        except ImportError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        return found

    async def find_in_a_thread() -> Found:
        return await asyncio.to_thread(find)

    return find_in_a_thread


def arrival_plugin(name: str) -> WorkerPlugin:
    """Make a plugin that sets up present and future workers for a run.

    The plugin is pickled by value, so that a worker without daskdl can load it. It
    imports daskdl in a thread, installs the channel plugin if the versions match, and
    reports the versions to the scheduler.
    """
    find, version = _version_finder(), VERSION

    class Arrival(WorkerPlugin):  # type: ignore[misc]  # Dask is untyped
        idempotent = True

        def __init__(self) -> None:
            self.name = name

        async def setup(self, worker: Worker) -> None:
            found = await find()
            if found["daskdl"] == version and not found["error"]:
                importlib.import_module("daskdl.channel.worker").set_up(worker)
            await worker.scheduler.daskdl_arrive(worker=worker.address, found=found)

        async def teardown(self, worker: Worker) -> None:
            # Dask also calls this before it sets up a plugin a second time, which can
            # happen on a new worker: its replicas must continue.
            end = worker.extensions.get(name)
            if end is not None and worker.status is not Status.running:
                await end.teardown(worker)

    return Arrival()


def mismatch(found: Found | Exception) -> str:
    """Return the reason why a process cannot take part in a run; empty if it can."""
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    other = []
    if found["daskdl"] not in ("", VERSION):
        other.append(f"daskdl {found['daskdl']}")
    if found["torch"] and _minor(found["torch"]) != _minor(torch.__version__):
        other.append(f"torch {found['torch']}")
    return " and ".join(other) or found["error"]


def _minor(version: str) -> str:
    """Return the minor version, which has to match; patches and builds may differ.

    Example:
        >>> _minor("2.8.1+cu128")
        '2.8'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
