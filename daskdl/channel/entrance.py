"""How a replica comes into a run: with all founders, or later, with a snapshot."""

import time
from typing import Any

from daskdl.channel import messages
from daskdl.channel.base import Stopped
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.entry import Entry
from daskdl.channel.link import Link
from daskdl.channel.messages import Answer
from daskdl.channel.payloads import unwrap_note
from daskdl.channel.remote_waits import RemoteWaits
from daskdl.errors import WaitTimeoutError
from daskdl.version import VERSION


class Entrance:
    """What is asked for, and of whom, until a replica is in.

    Args:
        link: The event loop's half of its channel.
        waits: Where its training thread waits.
        endpoint: Which replica it is.
    """

    def __init__(self, link: Link, waits: RemoteWaits, endpoint: Endpoint) -> None:
        self._link = link
        self._waits = waits
        self._replica = endpoint.replica
        self._grid = endpoint.grid
        self._timeouts = endpoint.timeouts

    def enter(self) -> Entry:
        """See :meth:`~daskdl.channel.base.Channel.join`."""
        # Updates may come before the answer does.
        self._link.wait_for_snapshot()
        answer = self._join()
        self._link.enter(answer["routes"])
        if answer["members"]:
            others = {r: s for r, s in answer["members"] if r != self._replica}
            self._link.inbox.meet(others)
            self._link.begin({}, self._grid)
            self._link.start()
            return Entry([r for r, _ in answer["members"]], None)
        self._link.start()
        snapshot = self._snapshot(answer)
        received = {o: (last, tuple(more)) for o, last, more in snapshot["received"]}
        received.pop(self._replica, None)
        self._link.begin(received, snapshot["grid"])
        return Entry([self._replica], snapshot)

    def _join(self) -> dict[str, Any]:
        bound = self._timeouts.bound("join", "request")
        return self._waits.ask(messages.JOIN, bound, version=VERSION)

    def _snapshot(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Ask the donor that was named, or another one if that has gone."""
        bound = self._timeouts.bound("join")
        deadline = time.monotonic() + bound.seconds
        while answer["donor"] is not None:
            given = self._waits.ask_worker(
                answer["worker"],
                messages.SNAPSHOT,
                replica=answer["donor"],
                cut=answer["cut"],
            )
            if given is not None and given["status"] == Answer.OK:
                return dict(unwrap_note(given["snapshot"]))
            if time.monotonic() > deadline:
                why = "it did not answer" if given is None else given.get("reason")
                raise WaitTimeoutError(
                    f"replica {self._replica} waited {bound} for a snapshot, last of "
                    f"replica {answer['donor']} on {answer['worker']}: {why}; last "
                    f"heard: {self._waits.last_heard()}"
                )
            answer = self._join()
        raise Stopped("nobody is left to begin from")
