"""The receiving half of a replica: updates that have arrived and wait to be applied.

Duplicates are dropped, gaps are noticed, and updates of one peer are applied in their
order. A full inbox folds updates together instead of growing.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskdl.channel.protocol import Message, MessageKind
from daskdl.codec import SparseUpdate, Update
from daskdl.compression.replica_vector import fold_
from daskdl.errors import ChannelError

# What was received of one origin: all up to a number, and those beyond a gap.
Received = tuple[int, Sequence[int]]


class Positions:
    """For each origin, which of its updates have been received.

    Updates of one origin are numbered from 1. Normally they come in order;
    a retried or re-routed one may come twice, a lost one leaves a gap that a
    later repair fills. Only what is beyond a gap takes memory, not the gap: a
    sequence number may be anything.

    Args:
        received: Where to start, as :meth:`received` gave it: that of a snapshot.
    """

    def __init__(self, received: Mapping[int, Received] | None = None) -> None:
        self._complete: dict[int, int] = {}  # received up to here, all of them
        self._beyond: dict[int, set[int]] = {}  # received after a gap
        for origin, (complete, beyond) in (received or {}).items():
            self._complete[origin] = complete
            self._beyond[origin] = set()
            for sequence in beyond:
                self.accept(origin, sequence)

    def accept(self, origin: int, sequence: int) -> bool:
        """Note an update; False if it was noted before (a duplicate)."""
        complete = self._complete.setdefault(origin, 0)
        beyond = self._beyond.setdefault(origin, set())
        if sequence <= complete or sequence in beyond:
            return False
        beyond.add(sequence)
        while complete + 1 in beyond:
            complete += 1
            beyond.remove(complete)
        self._complete[origin] = complete
        return True

    def has(self, origin: int, sequence: int) -> bool:
        """Whether an update has been received."""
        beyond = self._beyond.get(origin, ())
        return sequence <= self.complete(origin) or sequence in beyond

    def complete(self, origin: int) -> int:
        """All updates of an origin up to this one have been received."""
        return self._complete.get(origin, 0)

    def reached(self, target: Mapping[int, int]) -> bool:
        """Whether nothing is missing up to a target, however far that is."""
        return all(self.complete(origin) >= last for origin, last in target.items())

    def behind(self, target: Mapping[int, int]) -> dict[int, list[int]]:
        """The sequence numbers still missing up to a target, by origin."""
        behind: dict[int, list[int]] = {}
        for origin, last in target.items():
            beyond = self._beyond.get(origin, set())
            awaited = range(self._complete.get(origin, 0) + 1, last + 1)
            gaps = [sequence for sequence in awaited if sequence not in beyond]
            if gaps:
                behind[origin] = gaps
        return behind

    def received(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """What exactly was received of each origin, in plain values for the wire.

        Returns:
            By origin: all of its updates up to this one were received, and these
            beyond the first gap, ascending.

        Example:
            >>> positions = Positions()
            >>> [positions.accept(7, sequence) for sequence in (1, 2, 5)]
            [True, True, True]
            >>> positions.received()
            {7: (2, (5,))}
        """
        return {
            origin: (complete, tuple(sorted(self._beyond[origin])))
            for origin, complete in self._complete.items()
        }


# By replica and origin. Everyone's own updates count as received by itself.
Have = Mapping[int, Mapping[int, Received]]

NOTHING: Received = (0, ())


def settle(have: Have) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Everything that any survivor has received: what all must have.

    Args:
        have: What each survivor has received, and nobody else: with what a lost
            replica said it had, the target could be out of reach.

    Returns:
        By origin, in the form of :meth:`Positions.received`. It depends on
        nothing but `have`, so that all come to the same.

    Example:
        >>> settle({0: {7: (5, (7,))}, 1: {7: (6, ())}, 2: {7: (2, (9,))}})
        {7: (7, (9,))}
    """
    origins = sorted({origin for received in have.values() for origin in received})
    return {
        origin: _union([received.get(origin, NOTHING) for received in have.values()])
        for origin in origins
    }


def _union(parts: Sequence[Received]) -> tuple[int, tuple[int, ...]]:
    complete = max(part[0] for part in parts)
    later = sorted({s for _, beyond in parts for s in beyond if s > complete})
    filled = 0
    while filled < len(later) and later[filled] == complete + 1:
        complete += 1
        filled += 1
    return complete, tuple(later[filled:])


def missing(
    mine: Mapping[int, Received], target: Mapping[int, Received]
) -> dict[int, list[int]]:
    """What one replica lacks of a target, ascending, by origin.

    Unlike :meth:`Positions.behind` it does not ask for what the target leaves out.

    Example:
        >>> missing({7: (2, (5,))}, {7: (3, (5, 8)), 9: (1, ())})
        {7: [3, 8], 9: [1]}
    """
    lacking: dict[int, list[int]] = {}
    for origin, (complete, beyond) in target.items():
        done, taken = mine.get(origin, NOTHING)
        if done >= complete and not beyond:  # nearly always
            continue
        wanted = [*range(done + 1, complete + 1), *(s for s in beyond if s > done)]
        gaps = sorted(set(wanted) - set(taken))
        if gaps:
            lacking[origin] = gaps
    return lacking


def helpers(
    origin: int,
    sequences: Collection[int],
    have: Have,
    alive: Collection[int],
    asker: int,
) -> list[int]:
    """Whom to ask for updates of one origin, one after the other.

    The origin first, if it is alive: it keeps its own. Then those that have
    received most of what is asked for. Among equals each asker begins with another
    one, so that not all who miss the same ask the same.

    Args:
        origin: Whose updates are missing.
        sequences: Their numbers.
        have: What each replica has received, as far as it said.
        alive: Replicas that can be asked.
        asker: Replica that misses them; it is not among the helpers.

    Returns:
        Replicas that have received at least one of them; empty if nobody has.

    Example:
        >>> have = {0: {}, 1: {7: (5, ())}, 2: {7: (5, ())}, 3: {7: (4, ())}}
        >>> helpers(7, [4, 5], have, alive=[0, 1, 2, 3], asker=0)
        [1, 2, 3]
        >>> helpers(7, [4, 5], have, alive=[0, 1, 2, 3, 7], asker=3)
        [7, 2, 1]
    """
    tiers: dict[int, list[int]] = {}
    for replica in sorted(set(alive) - {asker, origin}):
        received = have.get(replica, {}).get(origin, NOTHING)
        held = sum(_holds(received, sequence) for sequence in sequences)
        tiers.setdefault(held, []).append(replica)
    order = [origin] if origin in alive and origin != asker else []
    for held in sorted(tiers.keys() - {0}, reverse=True):
        order += _rotated(tiers[held], asker)
    return order


def donors(have: Have, asker: int) -> list[int]:
    """Whose state to take when the rings could not help, one after the other.

    The reference is the replica with most updates; if anybody has the whole target,
    it does. All who have what it has are donors; everybody else takes their state,
    and with it goes back on what it alone has (of lost replicas, see above).

    Args:
        have: What each survivor has received, after they have asked each other.
        asker: Whose turn it is.

    Returns:
        Replicas, each asker beginning with another; empty if it has what they
        have and needs nothing.

    Raises:
        ChannelError: If every state lacks an update of a survivor. That does not
            happen while each keeps its own until all have them.

    Example:
        >>> have = {0: {0: (4, ()), 1: (2, ())}, 1: {0: (4, ()), 1: (2, ())}, 2: {}}
        >>> donors(have, asker=2), donors(have, asker=0)
        ([0, 1], [])
    """
    own = {replica: have[replica].get(replica, NOTHING) for replica in have}
    groups: dict[Hashable, list[int]] = {}
    for replica in sorted(have):
        groups.setdefault(_comparable(have[replica]), []).append(replica)
    fit = [group for group in groups.values() if not missing(have[group[0]], own)]
    if not fit:
        raise ChannelError(
            "updates are out of reach: no replica has received all that the others "
            f"have published, {own}, and those do not keep them any more"
        )
    same = max(fit, key=lambda group: _count(have[group[0]]))
    return [] if asker in same else _rotated(same, asker)


class Fence:
    """Which updates may still be taken in, once their origin is lost.

    What a lost replica sent may be under way for long, also in the answers of a
    helper. If one survivor took it in after it told what it had, the others would
    never hear of it. Who applies updates asks `admits` first, whatever way they
    came; not thread-safe, it belongs under the same lock as the positions.

    Example:
        >>> fence = Fence()
        >>> fence.close([7])
        >>> fence.admits(7, 3), fence.admits(8, 3)
        (False, True)
        >>> fence.open({7: (3, (5,))})
        >>> [fence.admits(7, sequence) for sequence in (3, 4, 5)]
        [True, False, True]
    """

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._target: Mapping[int, Received] = {}
        self._holding = False

    @property
    def holding(self) -> bool:
        """Whether the fence is closed to everybody, for as long as a barrier."""
        return self._holding

    def hold(self) -> None:
        """Admit nothing new of anybody: what one took in now, others might not."""
        self._holding = True

    def release(self) -> None:
        """The barrier is over: only what lost replicas sent stays out."""
        self._holding = False
        self._target = {}

    def close(self, lost: Iterable[int]) -> None:
        """Admit nothing of these replicas and of those named before."""
        self._lost |= set(lost)
        self._target = {}

    def open(self, target: Mapping[int, Received]) -> None:
        """Admit what all have settled on, until the fence is closed again."""
        self._target = target

    def admits(self, origin: int, sequence: int) -> bool:
        """Whether an update may be taken in."""
        if origin not in self._lost and not self._holding:
            return True
        return _holds(self._target.get(origin, NOTHING), sequence)


def _holds(received: Received, sequence: int) -> bool:
    complete, beyond = received
    return sequence <= complete or sequence in beyond


def _count(received: Mapping[int, Received]) -> int:
    return sum(complete + len(beyond) for complete, beyond in received.values())


def _comparable(received: Mapping[int, Received]) -> Hashable:
    """Equal if the updates are, whatever the wire made of them."""
    return frozenset(
        (origin, complete, tuple(beyond))
        for origin, (complete, beyond) in received.items()
        if complete or beyond
    )


def _rotated(replicas: Sequence[int], turn: int) -> list[int]:
    start = turn % len(replicas)
    return [*replicas[start:], *replicas[:start]]


UPDATE_BYTES = 440  # of memory around its entries, measured by `benchmarks/queues.py`


class DrainResult(NamedTuple):
    """Updates to apply, in an order that does not depend on arrival."""

    updates: list[Update]
    folded_N: NDArray[np.int32] | None  # counts of the grid; None if nothing folded
    received: Mapping[int, Received] = {}  # by origin: what has been received in all


class Pile:
    """Updates that wait.

    Beyond the bound all of them are folded into one dense vector of counts, which is
    exact, because sums of whole grid steps do not depend on their order.

    In step the bound is one for each step, and what comes of a step that was folded is
    folded too: whether it is applied as one vector, which rounds local otherwise, then
    depends on how much is sent in the step, and not on what arrives when.

    Args:
        size: Parameters of the model.
        grid: Of the run, parameter units.
        limit_bytes: Bytes of memory of waiting updates beyond which they are folded; in
            step, of those of one step.
        in_step: Replicas go in step, so that updates of two steps wait at most.

    Attributes:
        grid: Of the run, parameter units.
        folds: How often the bound was reached.
    """

    grid: float
    folds: int

    def __init__(
        self, size: int, grid: float, limit_bytes: int, *, in_step: bool = False
    ) -> None:
        self.grid = grid
        self.folds = 0
        self._size = size
        self._limit_bytes = limit_bytes
        self._in_step = in_step
        self._updates: list[Update] = []
        # By step where they go in step, else all at 0.
        self._bytes: Counter[int] = Counter()
        self._folded: dict[int, NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def nbytes(self) -> int:
        """Bytes of the updates that wait, as the bound counts them."""
        return self._bytes.total()

    def add(self, update: Update) -> None:
        """Keep an update until it is taken."""
        heap = self._heap_of(update)
        self._updates.append(update)
        self._bytes[heap] += _bytes_of(update)
        again = self._in_step and heap in self._folded
        if again or self._bytes[heap] > self._limit_bytes:
            self.folds += not again
            self._fold(heap)

    def take(self, up_to_step: int | None = None) -> DrainResult:
        """Take all, or only what was sent up to a step, and what is folded."""
        last = math.inf if up_to_step is None else up_to_step
        now = [u for u in self._updates if u.stamp.step <= last]
        self._updates = [u for u in self._updates if u.stamp.step > last]
        self._bytes.clear()
        for update in self._updates:
            self._bytes[self._heap_of(update)] += _bytes_of(update)
        due = [self._folded.pop(heap) for heap in [*self._folded] if heap <= last]
        for other_N in due[1:]:
            due[0] += other_N
        return DrainResult(sorted(now, key=lambda u: u.stamp), due[0] if due else None)

    def clear(self) -> None:
        """Forget what waits."""
        self._updates.clear()
        self._bytes.clear()
        self._folded.clear()

    def _heap_of(self, update: Update) -> int:
        return update.stamp.step if self._in_step else 0

    def _fold(self, heap: int) -> None:
        if heap not in self._folded:
            self._folded[heap] = np.zeros(self._size, np.int32)
        folded_N = self._folded[heap]
        for update in self._updates:
            if self._heap_of(update) == heap:
                fold_(folded_N, update, self.grid)
        self._updates = [u for u in self._updates if self._heap_of(u) != heap]
        self._bytes[heap] = 0


def _bytes_of(update: Update) -> int:
    if isinstance(update, SparseUpdate):
        return UPDATE_BYTES + update.entries_K.nbytes
    return UPDATE_BYTES + update.counts_N.nbytes


class Word(NamedTuple):
    """What a replica said of itself."""

    sequence: int  # of its last update by then
    step: int  # completed
    done: int = -1  # the last lap it is done with

    def joined(self, other: "Word") -> "Word":
        """What is known from both."""
        return Word(*map(max, self, other))


UNHEARD = Word(0, 0)


class Heard:
    """The last word of each other replica that trains.

    Args:
        clock: Seconds, by which it is kept when there was news of somebody.

    Attributes:
        lost: Replicas that are gone: nobody waits for them, whoever still names them.
    """

    lost: set[int]

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lost = set()
        self._clock = clock
        self._news_at: dict[int, float] = {}
        self._said: dict[int, Word] = {}
        self._known: dict[int, Word] = {}

    def hear(self, origin: int, word: Word, complete: int | None = None) -> bool:
        """Take note of a word.

        Args:
            origin: Who said it of itself.
            word: What.
            complete: All updates of the origin up to this one are here, and the
                word counts once those are that it speaks of. None: it counts now.

        Returns:
            Whether it says more than any word before.
        """
        if origin in self.lost:
            return False
        former = self._said.get(origin)
        latest = word if former is None else former.joined(word)
        if latest != former:
            self._news_at[origin] = self._clock()
        self._said[origin] = latest
        if complete is None or word.sequence <= complete:
            self._learn(origin, word)
        return latest != former

    def catch_up(self, origin: int, complete: int) -> None:
        """More updates of an origin are here: what it said of them counts now."""
        said = self._said.get(origin)
        if said is not None and said.sequence <= complete:
            self._learn(origin, said)

    def _learn(self, origin: int, word: Word) -> None:
        self._known[origin] = self._known.get(origin, UNHEARD).joined(word)

    def lose(self, origin: int) -> None:
        """A replica is gone."""
        self.lost.add(origin)
        self._said.pop(origin, None)
        self._known.pop(origin, None)

    def described(self) -> list[str]:
        """The last word of each in words, and when it came."""
        now = self._clock()
        return [
            f"replica {origin} at step {word.step}, update {word.sequence}, "
            f"{now - self._news_at[origin]:.1f} s ago"
            for origin, word in sorted(self._said.items())
        ]

    def others(self) -> list[int]:
        """The other replicas that train, ascending."""
        return sorted(self._known)

    def last(self) -> dict[int, int]:
        """The last update each has published, as far as it said."""
        return {origin: word.sequence for origin, word in self._said.items()}

    def steps(self) -> dict[int, int]:
        """Steps completed by each."""
        return {origin: word.step for origin, word in self._known.items()}

    def slowest(self, lap: int) -> int | None:
        """Steps completed by the slowest that is not done with a lap."""
        words: Collection[Word] = self._known.values()
        return min((w.step for w in words if w.done < lap), default=None)


class Early:
    """Items that wait for a snapshot; bounded, first copies only."""

    def __init__(self) -> None:
        self.items: list[Message] = []
        self.nbytes = 0
        self._positions = Positions()

    def keep(self, item: Message, limit_bytes: int) -> bool | None:
        """Keep a first copy; whether it is one, None if there is no room for it."""
        # Not folded, as a full inbox is: the snapshot may contain it.
        if self.items and self.nbytes >= limit_bytes:
            return None
        if not self._positions.accept(item.origin, item.sequence):
            return False
        self.items.append(item)
        self.nbytes += item.weight()
        return True


class Inbox:
    """What one replica has received.

    Args:
        size: Parameters of the model.
        grid: Of the run, parameter units.
        limit_bytes: Bytes of waiting updates beyond which they are folded.
        in_order: Updates of one origin never overtake each other or what it says
            of itself. If they may, a step counts once its updates are here.
        in_step: Replicas go in step; see :class:`Pile`.
        changed: Of whoever else has to know, and guards more than this; None: its own.
    """

    received_bytes: int  # of frames, since they were counted off
    refused: int  # frames that could not be read, likewise
    stopped: str | None  # why the replica has to leave

    def __init__(
        self,
        size: int,
        grid: float,
        limit_bytes: int,
        *,
        in_order: bool = True,
        in_step: bool = False,
        changed: threading.Condition | None = None,
    ) -> None:
        self.received_bytes = 0
        self.refused = 0
        self.stopped = None
        self._in_order = in_order
        self._positions = Positions()
        self._fence = Fence()
        self._heard = Heard()
        self._pile = Pile(size, grid, limit_bytes, in_step=in_step)
        self._changed = threading.Condition() if changed is None else changed

    @property
    def grid(self) -> float:
        """Of the run, parameter units."""
        return self._pile.grid

    # ---- event loop

    def put(self, item: Message, update: Update) -> bool:
        """Keep an update to be applied, once.

        Returns:
            False if it was received before, or must not be taken in, see
            `holds_back`.
        """
        with self._changed:
            if not self._fence.admits(item.origin, item.sequence):
                return False
            if not self._positions.accept(item.origin, item.sequence):
                return False
            self._pile.add(update)
            self.received_bytes += item.nbytes
            self._hear(item.origin, Word(item.sequence, item.step))
            self._heard.catch_up(item.origin, self._complete(item.origin))
            self._changed.notify_all()
            return True

    def holds_back(self, item: Message) -> bool:
        """Whether an update has to come again later, when the barrier is over."""
        with self._changed:
            key = item.origin, item.sequence
            here = self._positions.has(*key) or self._fence.admits(*key)
            return self._fence.holding and not here

    def note(self, item: Message) -> bool:
        """Keep what a control item says; whether that is news of its origin."""
        news = True
        with self._changed:
            if item.kind == MessageKind.STOP:
                self.stopped = self.stopped or str(item.payload)
            elif item.kind == MessageKind.LOST:
                self._heard.lose(item.origin)
            else:
                done = int(item.payload) if item.kind == MessageKind.PROGRESS else -1
                word = Word(item.sequence, item.step, done)
                news = self._hear(item.origin, word)
            self._changed.notify_all()
        return news

    def hear(self, words: Mapping[int, Word]) -> None:
        """Keep what the scheduler says of the others."""
        with self._changed:
            for origin, word in words.items():
                self._hear(origin, word)
            self._changed.notify_all()

    def refuse(self) -> None:
        """Count a frame that could not be read."""
        with self._changed:
            self.refused += 1

    def stop(self, reason: str) -> None:
        """Make every wait here end."""
        with self._changed:
            self.stopped = self.stopped or reason
            self._changed.notify_all()

    def _hear(self, origin: int, word: Word) -> bool:
        complete = None if self._in_order else self._complete(origin)
        return self._heard.hear(origin, word, complete)

    def _complete(self, origin: int) -> int:
        return self._positions.complete(origin)

    def gaps(self, most: int) -> dict[int, list[int]]:
        """What those that are here have published, as they said, and is not here.

        Args:
            most: How far to look beyond the first gap of each.
        """
        with self._changed:
            last = {
                origin: min(last, self._complete(origin) + most)
                for origin, last in self._heard.last().items()
            }
            return self._positions.behind(last)

    def received(self) -> dict[int, Received]:
        """What exactly was received of each origin."""
        with self._changed:
            return dict(self._positions.received())

    # ---- training thread

    def begin(self, received: Mapping[int, Received], grid: float) -> None:
        """Take over what another replica had applied, with its snapshot."""
        with self._changed:
            self._pile.grid = grid
            self._pile.clear()
            self._positions = Positions(received)
            for origin in self._heard.last():
                self._heard.catch_up(origin, self._complete(origin))

    def hold(self, lost: Iterable[int]) -> dict[int, Received]:
        """Take nothing in from now on; say what was received until now.

        Args:
            lost: Replicas of which nothing is taken in afterwards either.
        """
        with self._changed:
            self._fence.close(lost)
            self._fence.hold()
            return dict(self._positions.received())

    def open(self, target: Mapping[int, Received]) -> None:
        """Take in what all have settled on, until the next `hold`."""
        with self._changed:
            self._fence.open(target)

    def release(self) -> None:
        """The barrier is over: take in what comes."""
        with self._changed:
            self._fence.release()

    def sync(self, replicas: Iterable[int], step: int, grid: float) -> None:
        """All replicas have met.

        Args:
            replicas: The others.
            step: Steps each has made.
            grid: Of the run, from now on.
        """
        with self._changed:
            self._pile.grid = grid
            for replica in replicas:
                self._heard.hear(replica, Word(0, step))

    def meet(self, steps: Mapping[int, int]) -> None:
        """Get to know other replicas, and the steps they have made."""
        with self._changed:
            for replica, step in steps.items():
                self._heard.hear(replica, Word(0, step))

    def others(self) -> list[int]:
        """The other replicas that train, ascending, as far as known."""
        with self._changed:
            return self._heard.others()

    def lost(self) -> set[int]:
        """Replicas that are gone, as far as known."""
        with self._changed:
            return set(self._heard.lost)

    def drain(self, up_to_step: int | None = None) -> DrainResult:
        """Take what waits, and say what has been received in all.

        Args:
            up_to_step: For runs in step, in which an update from a replica's next
                step must not be applied before one's own.
        """
        with self._changed:
            drained = self._pile.take(up_to_step)
            return drained._replace(received=self._positions.received())

    def slowest(self, lap: int) -> int | None:
        """Steps completed by the slowest other replica not done with a lap."""
        with self._changed:
            return self._heard.slowest(lap)

    def steps(self) -> dict[int, int]:
        """Steps completed by each other replica, as far as known."""
        with self._changed:
            return self._heard.steps()

    def last_words(self) -> list[str]:
        """What each other replica said last, and when, for messages."""
        with self._changed:
            return self._heard.described()

    def count_off(self) -> tuple[int, int, int]:
        """Bytes received, frames refused and folds since the last call."""
        with self._changed:
            counted = (self.received_bytes, self.refused, self._pile.folds)
            self.received_bytes = self.refused = self._pile.folds = 0
        return counted

    def reached(self, target: Mapping[int, int]) -> bool:
        """Whether all has been received of what others have sent up to a target."""
        with self._changed:
            return self._positions.reached(target)

    def behind(self, target: Mapping[int, int]) -> dict[int, list[int]]:
        """What has not been received of what others have sent."""
        with self._changed:
            return self._positions.behind(target)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block until ready or stopped; False on time-out.

        Args:
            ready: Checked after each change; may call the methods above.
            timeout_s: Seconds; None: no bound.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self.stopped is not None or ready(), timeout_s
            )

    def wake(self) -> None:
        """Let whoever waits look again, because something else changed."""
        with self._changed:
            self._changed.notify_all()
