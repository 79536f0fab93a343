"""How all replicas come to the same updates at a barrier, without a relay.

The order is that of :mod:`daskdl.channel.repair`, carried out by every survivor. All
read the same notes, and decide from these alone, so that all go the same way.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskdl.channel import messages
from daskdl.channel.base import Load
from daskdl.channel.gathered import Gathered, Last
from daskdl.channel.link import Link
from daskdl.channel.messages import Answer, Barrier
from daskdl.channel.payloads import unwrap_note
from daskdl.channel.positions import Received
from daskdl.channel.remote_waits import RemoteWaits
from daskdl.channel.repair import Have, donors, helpers, missing, settle
from daskdl.errors import WaitTimeoutError

logger = logging.getLogger(__name__)

Gather = Callable[[str, Any, Barrier], Gathered]


class Agreement:
    """One replica's part in it; belongs to its training thread.

    Args:
        link: The event loop's half of its channel.
        waits: Where it waits.
        gather: Meets the others: :meth:`Channel.gather`.
    """

    def __init__(self, link: Link, waits: RemoteWaits, gather: Gather) -> None:
        self._link = link
        self._inbox = link.inbox
        self._waits = waits
        self._gather = gather
        self._replica = link.connection.endpoint.replica

    def reach(self, key: str, published: Last, gone: Last, load: Load) -> None:
        """Return when all survivors have the same; arguments of :meth:`Channel.agree`.

        Raises:
            ChannelError: If updates of a survivor are out of reach.
            WaitTimeoutError: If nobody gives a replica what it misses.
        """
        self._wait_for_the_living(published, gone)
        known = set(gone)
        repaired = False  # by asking for updates; then only a state can help
        deadline = math.inf
        for turn in itertools.count():
            have, lost = self._tell(f"{key}, round {turn}", known)
            if lost != known:  # somebody told before that was known
                known, repaired, deadline = lost, False, math.inf
                continue
            if _same(have):
                return
            now, patience = time.monotonic(), self._waits.patience
            if now > deadline:
                raise WaitTimeoutError(
                    f"replicas {sorted(have)} did not come to the same updates within "
                    f"{patience}, {turn + 1} rounds; last heard: "
                    f"{self._waits.last_heard()}"
                )
            deadline = min(deadline, now + patience.seconds)
            if repaired:
                self._take_state(have, load)
            else:
                self._pull_all(have)
            repaired = not repaired

    def _wait_for_the_living(self, published: Last, gone: Last) -> None:
        def behind() -> Mapping[int, Sequence[int]]:
            without = {self._replica, *gone, *self._inbox.lost()}
            target = {o: s for o, s in published.items() if o not in without}
            return self._inbox.behind(target)

        self._waits.until("updates", lambda: not behind(), behind)

    def _tell(self, key: str, gone: set[int]) -> tuple[Have, set[int]]:
        """What each survivor has, after nothing more can come; and who is gone."""
        own = {self._replica: (self._link.carrier.sequence, ())}
        received: Mapping[int, Received] = {**self._inbox.hold(gone), **own}
        note = [[o, last, list(more)] for o, (last, more) in sorted(received.items())]
        gathered = self._gather(key, {"received": note}, Barrier.AGREE)
        survivors = sorted(gathered.notes.keys() - gathered.gone.keys())
        have = {r: _received(gathered.notes[r]) for r in survivors}
        return have, set(gathered.gone)

    def _pull_all(self, have: Have) -> None:
        """Ask for what is missing, one after the other, until it is here."""
        target = settle(have)
        self._inbox.open(target)
        for origin, sequences in missing(have[self._replica], target).items():
            for helper in helpers(origin, sequences, have, have, self._replica):
                if self._pull(helper, origin, target[origin]):
                    break

    def _pull(self, helper: int, origin: int, target: Received) -> bool:
        """Ask one replica until it has no more; whether nothing is missing then."""
        former: Sequence[int] = []
        while True:
            lacking = missing(self._inbox.received(), {origin: target})
            if not lacking or lacking[origin] == former:
                return not lacking
            former = lacking[origin]
            pulling = self._link.pull(helper, origin, former)
            self._waits.until_true("repair", pulling.done, None)  # it has a bound

    def _take_state(self, have: Have, load: Load) -> None:
        """Begin again from one who has what this replica cannot get."""
        workers = self._link.repairs.workers
        for donor in donors(have, self._replica):
            if donor not in workers:
                continue
            answer = self._waits.ask_worker(
                workers[donor], messages.SNAPSHOT, replica=donor, cut=[]
            )
            if answer is None or answer["status"] != Answer.OK:
                continue
            snapshot = unwrap_note(answer["snapshot"])
            if _plain(_received(snapshot)) != _plain(have[donor]):
                continue
            received = dict(_received(snapshot))
            received.pop(self._replica, None)
            self._inbox.begin(received, snapshot["grid"])
            load(snapshot)
            logger.warning(
                "replica %s has taken the state of replica %s, which had more of those "
                "that are lost; its own residual stays",
                self._replica,
                donor,
            )
            return


def _received(note: Mapping[str, Any]) -> dict[int, Received]:
    return {origin: (last, tuple(more)) for origin, last, more in note["received"]}


def _same(have: Have) -> bool:
    first, *others = (_plain(received) for received in have.values())
    return all(received == first for received in others)


def _plain(received: Mapping[int, Received]) -> Mapping[int, Received]:
    return {o: (last, more) for o, (last, more) in received.items() if last or more}
