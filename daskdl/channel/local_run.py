"""A run whose replicas are threads of this process."""

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Inbox
from daskdl.channel.parcel import Arrays
from daskdl.channel.plan import RunPlan
from daskdl.channel.run import RunRecord
from daskdl.errors import ChannelError, DaskDLError, OptionError, WaitTimeoutError
from daskdl.timeouts import Bound


class LocalRun:
    """A run in this process, for whoever started it and for its replicas' channels.

    Args:
        plan: What is asked for; its `replicas` say where they are for messages only.
        now: A clock, seconds.

    Attributes:
        record: What is known of the run; looked at and changed under `changed`.
        changed: Notified after every change.
        offers: What replicas let others fetch, by replica and name.
        fetched_bytes: That others have fetched of each, since it counted them off.
        now: The clock.
    """

    record: RunRecord
    changed: threading.Condition
    offers: dict[tuple[int, str], Arrays]
    fetched_bytes: Counter[int]
    now: Callable[[], float]

    def __init__(
        self, plan: RunPlan, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.record = RunRecord(plan)
        self.changed = threading.Condition()
        self.now = now
        self.offers = {}
        self.fetched_bytes = Counter()
        self._inboxes: dict[int, Inbox] = {}

    def enter(self, endpoint: Endpoint) -> Inbox:
        """Make the inbox of a replica.

        Raises:
            ChannelError: If there is one already.
            OptionError: If updates are to be dropped on purpose.
        """
        replica = endpoint.replica
        if endpoint.drops:
            raise OptionError(
                f"among threads of one process no update can get lost, got "
                f"{endpoint.drops[0]}; leave it out, or train on a cluster"
            )
        with self.changed:
            if replica in self._inboxes:
                raise ChannelError(
                    f"replica {replica} of run {endpoint.run} is here already"
                )
            inbox = Inbox(
                endpoint.size,
                endpoint.grid,
                endpoint.inbox_bytes,
                in_step=endpoint.in_step,
                changed=self.changed,
            )
            inbox.stopped = self.record.stopped
            self._inboxes[replica] = inbox
        return inbox

    def offer(self, replica: int, name: str, arrays: Arrays) -> None:
        """A replica lets others fetch something."""
        with self.changed:
            self.offers[replica, name] = arrays
            self.changed.notify_all()

    def withdraw(self, replica: int, but: str = "") -> None:
        """Keep nothing of what a replica has offered, but what has this name."""
        with self.changed:
            for origin, name in list(self.offers):
                if origin == replica and name != but:
                    del self.offers[origin, name]

    def forget(self, replica: int) -> None:
        """A replica has left; the others learn of it."""
        with self.changed:
            self.withdraw(replica)
            if self._inboxes.pop(replica, None) is not None:
                self.record.remove(replica)
                self.changed.notify_all()

    def hear(self, replica: int) -> None:
        """A replica shows that it lives. Call under `changed`."""
        self.record.members.progress[replica].heard_at = self.now()

    @contextlib.contextmanager
    def waiting(self, replica: int) -> Iterator[None]:
        """Meanwhile a replica that has joined waits for others: it is not silent."""
        progress = self.record.members.progress[replica]
        progress.heard_at = math.inf
        try:
            yield
        finally:
            progress.heard_at = self.now()

    def patience_s(self, bound: Bound) -> float:
        """How long until one may have been silent for longer than a bound, seconds."""
        members = self.record.members
        heard = min(members.progress[r].heard_at for r in members.present)
        return max(min(heard + bound.seconds - self.now(), bound.seconds), 0.0)

    def look_for_silent(self, bound: Bound) -> None:
        """Give the run up if one was silent for longer than a bound.

        Its thread holds on to what it has, and nobody can come in its place.
        """
        members, now = self.record.members, self.now()
        silent = members.silent_since(now - bound.seconds)
        if silent:
            who = members.describe_all(silent, now)
            self.give_up(WaitTimeoutError(f"nothing was heard for {bound} of {who}"))

    def describe(self, replica: int) -> str:
        """A replica in words: who, and what was last heard, and when."""
        with self.changed:
            return self.record.members.describe(replica, self.now())

    def watch(
        self, seen: int, timeout_s: float, over: Callable[[], bool] = lambda: False
    ) -> list[dict[str, Any]]:
        """Events after the `seen` first ones; wait for one, but not for long.

        Args:
            seen: They are forgotten.
            timeout_s: Seconds.
            over: Whether not to wait, checked after each change.
        """
        events = self.record.events
        with self.changed:
            self.changed.wait_for(lambda: len(events) > seen or over(), timeout_s)
            return events.since(seen)

    def stop(self, reason: str) -> None:
        """Tell every replica to leave."""
        with self.changed:
            self.record.stop(reason)
            for inbox in self._inboxes.values():  # also of those that have not joined
                inbox.stop(reason)
            self.changed.notify_all()

    def give_up(self, error: DaskDLError) -> None:
        """The run cannot go on; who started it learns why."""
        with self.changed:
            self.record.give_up(error)
            self.stop(str(self.record.stopped))

    def fail(self, replica: int, failure: Mapping[str, Any]) -> None:
        """A replica cannot go on; who started the run learns why."""
        with self.changed:
            self.record.fail(replica, failure)
            self.stop(str(self.record.stopped))

    @property
    def here(self) -> list[int]:
        """Replicas that have a channel, ascending."""
        with self.changed:
            return sorted(self._inboxes)
