"""One run, as its client sees it: begin, follow the news, end."""

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

import cloudpickle

from daskdl import errors
from daskdl.errors import DaskDLError, ReplicaError, RunError
from daskdl.packed import Packed
from daskdl.training.merge import Final
from daskdl.training.stage import Event, Stage
from daskdl.training.task import Recipe

WATCH_S = 0.5  # how long a question for news may wait for some


class Driver:
    """One run, from its client's thread.

    Args:
        stage: Where it takes place.

    Attributes:
        final: What it ended with: the last agreed state if it did not come to its
            end, None if there was none.
        kept: The epoch whose agreed state this is, if the replicas that had a later
            one are lost.
        begun: Whether the replicas were told to begin.
    """

    final: Final | None
    kept: int | None
    begun: bool

    def __init__(self, stage: Stage) -> None:
        self.final = self.kept = None
        self.begun = False
        self._stage = stage
        self._failure: Exception | None = None
        self._stopped: str | None = None

    def run(self, recipe: Packed[Recipe], on_event: Callable[[Event], None]) -> None:
        """Train, and leave nothing of the run on the stage.

        Args:
            recipe: The user's objects.
            on_event: Called with each event, in order, as it comes.

        Raises:
            DaskDLError: Why the run ended early. Whatever `on_event` raises, and
                Ctrl-C, end it too and come out as they are.
        """
        self._stage.open()
        with contextlib.ExitStack() as ending:
            ending.push(self._end)
            self._stage.start(recipe)
            self.begun = True
            self._follow(on_event)
        reason = self._reason()
        try:
            if reason is not None:
                raise reason
        finally:
            # Else it would hold itself, and by its frames the user's data with it.
            del reason

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the stage clean; an exception that is under way goes on."""
        try:
            if kind is not None:
                self._stage.stop(f"the client stopped it: {kind.__name__}")
            self.final = self._stage.collect()
        finally:
            self._fall_back()
            self._stage.close()

    def _fall_back(self) -> None:
        """Nothing comes from the replicas: take what was brought before, if anything.

        Neither does anything come of those that had not agreed on anything.
        """
        if self.final is not None and self.final.parameters:
            return
        kept = self._stage.kept()
        if kept is not None:
            parameters, outcome = kept.parameters, None
            if self.final is not None:
                outcome = self.final.outcome
            self.kept, self.final = kept.epoch, Final(parameters, None, outcome)

    def _follow(self, on_event: Callable[[Event], None]) -> None:
        for event in self._events():
            if event["kind"] == "failed":
                self._failure = self._failure or self._exception(event)
            self._stage.heed(event)
            on_event(event)
            if event["kind"] == "stopped":
                self._stopped = event["summary"]
                return

    def _events(self) -> Iterator[Event]:
        """News until every replica has ended."""
        seen = 0
        while True:
            ended = self._stage.ended()
            news = self._stage.news(seen, 0 if ended else WATCH_S)
            seen += len(news)
            yield from news
            self._raise_errors()
            if ended and not news:
                return

    def _raise_errors(self) -> None:
        for replica, error in self._stage.errors():
            where = f"replica {replica} on {self._stage.seats[replica]}"
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
        try:
            if event.get("pickled"):
                # User code: the class may be its own, or known on the worker alone.
                with contextlib.suppress(Exception):  # its traceback says enough
                    error.__cause__ = cloudpickle.loads(event["pickled"])
            return error
        finally:
            # The cause's traceback knows this frame.
            del error

    def _gone(self) -> str:
        """Replicas that were lost before, which may be why another one failed."""
        seats = self._stage.seats
        where = ", ".join(f"replica {r} on {seats[r]}" for r in self._stage.given_up())
        return f"; gone before: {where}" if where else ""

    def _reason(self) -> Exception | None:
        failure, self._failure = self._failure, None
        if failure is not None:
            return failure
        if self._stopped is not None:
            return RunError(f"the run was stopped: {self._stopped}")
        return None
