"""The client's side of a run: open it, place its replicas, watch, clean up."""

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import cloudpickle
from distributed import Client, Future

from daskdl import errors
from daskdl.channel import messages
from daskdl.channel.messages import Answer
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.data.pieces import Pieces
from daskdl.data.scattering import scatter
from daskdl.errors import (
    ChannelError,
    DaskDLError,
    ReplicaError,
    RunError,
    WaitTimeoutError,
)
from daskdl.packed import Packed
from daskdl.training.collect import collect
from daskdl.training.launch import train_replica
from daskdl.training.merge import Final
from daskdl.training.seats import replicas_on
from daskdl.training.task import Recipe, TaskOptions
from daskdl.version import VERSION

logger = logging.getLogger(__name__)

# What unpickling a user's exception may raise: its class may need more arguments
# than it passed on, or be known on the worker alone.
UNREADABLE = (
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    pickle.PickleError,
)

WATCH_S = 0.5  # how long the scheduler may keep a question without news

Event = Mapping[str, Any]


class Limits(NamedTuple):
    """Bounds of a run that its replicas do not see."""

    relay_bytes: int  # of the relay's queue for each replica
    most_replicas: int  # more would have nothing to do


class Driver:
    """One run, as its client sees it.

    Args:
        client: Synchronous client of the cluster.
        options: Of the run.
        seats: Worker address of each founder.
        pieces: Of each phase.
        limits: Bounds of the run that its replicas do not see.
    """

    def __init__(
        self,
        client: Client,
        options: TaskOptions,
        seats: Mapping[int, str],
        pieces: Mapping[str, Pieces],
        limits: Limits,
    ) -> None:
        self._client = client
        routing = options.master.routing_for(len(seats))
        self._options = dataclasses.replace(options, routing=routing)
        self._seats = dict(seats)
        self._founders = set(seats)
        self._pieces = pieces
        self._limits = limits
        self._futures: dict[int, Future] = {}
        self._asked_again: dict[str, float] = {}  # when, by worker; monotonic clock
        self._failure: Exception | None = None
        self._stopped: str | None = None
        self._heard_at = time.monotonic()  # of the scheduler's last answer

    def run(
        self, recipe: Packed[Recipe], on_event: Callable[[Event], None]
    ) -> tuple[Final | None, BaseException | None]:
        """Train, and leave nothing of the run on the cluster.

        Args:
            recipe: The user's objects.
            on_event: Called with each event, in order, as it comes.

        Returns:
            What the run ended with, the last agreed state if it did not come to
            its end, None if there was none; and why it ended early, or None.
        """
        self._open()
        interruption: BaseException | None = None
        try:
            try:
                self._found(recipe)
                self._follow(recipe, on_event)
            except BaseException as error:  # also Ctrl-C: the cluster is left clean
                interruption = error
                self._stop(f"the client stopped it: {type(error).__name__}")
            final = collect(self._client, self._tasks(), self._options)
        finally:
            self._close()
        return final, interruption or self._reason()

    def _open(self) -> None:
        self._client.register_plugin(ChannelSchedulerPlugin())
        self._client.register_plugin(ChannelWorkerPlugin())
        options = self._options
        plan = {
            "run": options.run,
            "replicas": dict(self._seats),
            "pieces": {
                phase: [piece.key for piece in pieces]
                for phase, pieces in self._pieces.items()
            },
            "seed": options.seed if options.shuffle else None,
            "epochs_before": options.epochs_before,
            "synchronous": options.master.synchronous,
            "relay_bytes": self._limits.relay_bytes,
            "min_replicas": options.master.min_replicas,
            "timeouts": vars(options.timeouts),
            "routing": options.routing,
        }
        answer = self._ask(messages.OPEN, plan=plan, client=self._client.id)
        if answer.get("version") != VERSION:
            self._ask(messages.CLOSE)
            raise ChannelError(
                f"the scheduler has daskdl {answer.get('version')}, this client "
                f"{VERSION}; install the same version on all"
            )

    def _found(self, recipe: Packed[Recipe]) -> None:
        """Start the founders; not those whose worker has gone meanwhile."""
        seats = dict(self._seats)
        while True:
            try:
                self._submit(recipe, seats)
            except OSError as error:
                there = set(self._client.nthreads())
                gone = [r for r, worker in seats.items() if worker not in there]
                if not gone or len(gone) == len(seats):
                    raise
                logger.warning("replicas %s are not started: %s", gone, error)
                self._dismiss(gone)
                seats = {r: w for r, w in seats.items() if r not in gone}
            else:
                return

    def _submit(self, recipe: Packed[Recipe], seats: Mapping[int, str]) -> None:
        workers = sorted(set(seats.values()))
        name = f"daskdl-recipe-{self._options.run:x}-{min(seats)}"
        bound_s = self._options.timeouts.request
        sent = scatter(self._client, {name: recipe}, workers, bound_s)
        per_worker = {w: list(seats.values()).count(w) for w in workers}
        for replica, worker in seats.items():
            self._futures[replica] = self._client.submit(
                train_replica,
                sent[name],
                self._options,
                replica,
                per_worker[worker],
                founder=replica in self._founders,
                key=f"daskdl-train-{self._options.run:x}-{replica}",
                workers=[worker],
                allow_other_workers=False,
                pure=False,
                retries=0,
            )

    def _follow(
        self, recipe: Packed[Recipe], on_event: Callable[[Event], None]
    ) -> None:
        act: dict[str, Callable[[Event], None]] = {
            "failed": self._note_failure,
            # Pinned to a worker that is gone, the task would wait for ever.
            "removed": lambda event: self._cancel(event["replica"]),
            "lost": lambda event: self._cancel(event["replica"]),
            "worker": lambda event: self._seat(recipe, event["worker"]),
            "missing": self._restore,
            "over": self._send_away,
        }
        for event in self._events():
            if event["kind"] in act:
                act[event["kind"]](event)
            on_event(event)
            if event["kind"] == "stopped":
                self._stopped = event["summary"]
                return

    def _note_failure(self, event: Event) -> None:
        self._failure = self._failure or self._exception(event)

    def _send_away(self, event: Event) -> None:
        """Nobody is left to begin from: these came too late."""
        for replica in event["waiting"]:
            self._cancel(replica)

    def _seat(self, recipe: Packed[Recipe], worker: str) -> None:
        """A worker is there, or free again: let it take part."""
        wanted = replicas_on(self._options.master, self._client, [worker])[worker]
        room = self._limits.most_replicas - len(self._futures)
        answer = self._ask(messages.SEAT, worker=worker, replicas=min(wanted, room))
        newcomers = dict.fromkeys(answer.get("replicas", ()), worker)
        self._seats |= newcomers
        if newcomers:
            try:
                self._submit(recipe, newcomers)
            except OSError as error:  # it may have gone again, or hangs
                logger.warning("no replica on %s: %s", worker, error)
                self._dismiss(newcomers)
                # Not at once: to wait for it holds up the others' news.
                bound_s = self._options.timeouts.request
                self._asked_again[worker] = time.monotonic() + bound_s

    def _restore(self, event: Event) -> None:
        """Start a lost piece again: where it is wanted, else on any that takes it."""
        phase, index = event["phase"], event["piece"]
        others = set(self._client.nthreads()) - {event["worker"], *event["avoid"]}
        for home in (event["worker"], *sorted(others)):
            try:
                piece = self._pieces[phase].restore(index, event["key"], [home])
            except OSError as error:  # it has gone, or hangs
                logger.info("piece %s is not put on %s: %s", index, home, error)
                continue
            self._ask(messages.RESTORE, phase=phase, piece=index, key=piece.key)
            return

    def _events(self) -> Iterator[Event]:
        """News until every replica's task has ended."""
        seen = 0
        while True:
            ended = all(future.done() for future in self._futures.values())
            answer = self._ask(
                messages.WATCH, seen=seen, timeout_s=0 if ended else WATCH_S
            )
            news = answer["events"]
            seen += len(news)
            yield from news
            self._raise_task_errors()
            if ended and not news:
                return
            yield from self._due()
            yield from self._lost_pieces()

    def _due(self) -> Iterator[Event]:
        """Workers that did not take what a newcomer needs, and are asked again."""
        for worker, due in list(self._asked_again.items()):
            if time.monotonic() >= due:
                del self._asked_again[worker]
                yield {"kind": "worker", "worker": worker}

    def _lost_pieces(self) -> Iterator[Event]:
        """What died with its worker: a replica that comes to it shall find it there."""
        training = sorted({self._seats[replica] for replica in self._futures})
        for phase, pieces in self._pieces.items():
            for piece in pieces.lost() if training else ():
                worker = training[piece.index % len(training)]
                asked = {"phase": phase, "piece": piece.index, "key": piece.key}
                yield {"kind": "missing", "worker": worker, "avoid": (), **asked}

    def _raise_task_errors(self) -> None:
        for replica, future in list(self._futures.items()):
            if future.status == "cancelled":
                # Its worker is gone, or was before it came there.
                logger.info("Dask has given up the task of replica %s", replica)
                self._cancel(replica)
            elif future.status == "error":
                error = future.exception()
                if replica not in self._founders:
                    logger.warning("a newcomer did not start: %s", error)
                    self._dismiss([replica])
                    continue
                where = f"replica {replica} on {self._seats[replica]}"
                if isinstance(error, DaskDLError):
                    raise type(error)(f"{where}: {error}") from error
                raise ReplicaError(
                    f"{where} failed: {type(error).__name__}: {error}"
                ) from error

    def _exception(self, event: Event) -> Exception:
        kind: type[DaskDLError] = getattr(errors, event["type"])
        if "worker" not in event:
            return kind(event["summary"])
        message = f"replica {event['replica']} on {event['worker']}: {event['summary']}"
        message += self._gone()
        if kind is ReplicaError:
            message += f"\n\nTraceback of the worker:\n{event['traceback']}"
        error = kind(message)
        if event.get("pickled"):
            with contextlib.suppress(*UNREADABLE):  # its traceback says enough
                error.__cause__ = cloudpickle.loads(event["pickled"])
        return error

    def _gone(self) -> str:
        """Replicas whose workers went before, which may be why another one failed."""
        gone = [r for r in self._seats if r not in self._futures]
        where = ", ".join(f"replica {r} on {self._seats[r]}" for r in gone)
        return f"; gone before: {where}" if gone else ""

    def _reason(self) -> Exception | None:
        if self._failure is not None:
            return self._failure
        if self._stopped is not None:
            return RunError(f"the run was stopped: {self._stopped}")
        return None

    def _stop(self, reason: str) -> None:
        self._ask(messages.STOP, reason=reason)

    def _tasks(self) -> dict[str, Future]:
        return {
            f"replica {replica} on {self._seats[replica]}": future
            for replica, future in self._futures.items()
        }

    def _cancel(self, replica: int) -> None:
        future = self._futures.pop(replica, None)
        if future is not None:
            future.cancel()

    def _dismiss(self, replicas: Iterable[int]) -> None:
        """These do not start: their seats are free for others."""
        for replica in replicas:
            self._cancel(replica)
            self._ask(messages.UNSEAT, replica=replica)

    def _close(self) -> None:
        for replica in list(self._futures):
            self._cancel(replica)
        still_here = self._ask(messages.CLOSE).get("still_here")
        if still_here:
            bound = self._options.timeouts.bound("stop")
            logger.warning("after %s these have not left: %s", bound, still_here)

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        async def ask() -> Any:
            request = getattr(self._client.scheduler, operation)
            if operation != messages.OPEN:
                fields["run"] = self._options.run
            return await asyncio.wait_for(request(**fields), bound.seconds)

        bound = self._options.timeouts.bound("request")
        try:
            answer = self._client.sync(ask)
        except TimeoutError as error:
            ago_s = time.monotonic() - self._heard_at
            raise WaitTimeoutError(
                f"the scheduler did not answer {operation} within {bound}; it last "
                f"answered {ago_s:.1f} s ago"
            ) from error
        self._heard_at = time.monotonic()
        if not isinstance(answer, dict) or answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler answered {answer!r} to {operation}")
        return answer
