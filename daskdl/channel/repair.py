"""Who asks whom for what, so that all survivors end with the same updates. No I/O.

Whoever is behind asks. Repair at a barrier goes in this order, on every survivor:

1. Close the :class:`Fence`: nothing more of a lost replica is taken in. Only
   then tell all others what was received, with one's own updates up to the last
   published one.
2. :func:`settle` on the target, which is the same for all, and open the fence
   to it.
3. Ask the :func:`helpers` for what is :func:`missing`, one after the other, and
   find it in their rings.
4. Close the fence again, for good, and tell again what was received. Who is still
   behind takes the state of one of the :func:`donors`: its shared vector, with
   the positions that belong to it.

If somebody is lost meanwhile, start again: what only it had may be out of reach,
and what it gave away has been received by a survivor, who says so.

**The target is every update that any survivor has received**, not the longest run
without a gap: updates are applied as they come, so an update beyond a gap is in
somebody's vector. Where no survivor has what is in the gap, it stays out, for
everybody.

**Which updates can be lost.** None of a survivor, on one condition: a replica
keeps its own updates at least until all have them, and publishes nothing while there
is no room for more (:class:`~daskdl.channel.unconfirmed.Unconfirmed`).
An update of a lost replica is given up only if no survivor has it in a ring any
more and nobody has the whole target; then it is given up by all.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from daskdl.channel.positions import Received
from daskdl.errors import ChannelError

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
