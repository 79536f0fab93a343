"""Who passes an update on to whom when replicas send to each other. No I/O.

There is no list of links. A route is arithmetic on the members, so that two
replicas that know the same members agree without a word.
"""

from bisect import bisect_left
from dataclasses import dataclass

from daskdl.errors import OptionError

FAN_OUT = 8  # two hops reach 73 replicas, three 585
# Scaling up by 32 workers is 32 generations within a second, in which frames of
# the first are still on their way. One of 128 members takes 1 KB.
GENERATIONS_KEPT = 32


@dataclass(frozen=True)
class Routes:
    """One tree for each origin over the members of one generation.

    In the tree of the origin with index `i` among the `n` members, the member
    with index `j` has position ``(j - i) % n``, and position `p` passes on to the
    positions ``fan_out * p + 1`` to ``fan_out * p + fan_out``. The origin is the
    root. While there are at most ``fan_out + 1`` members it sends to all others
    and nobody forwards. Beyond that the rotation puts every member at every
    position once over all origins, so that all forward the same amount; in one
    shared tree the inner nodes would carry up to `fan_out` times what the leaves do.

    Args:
        generation: Of the membership, >= 0.
        members: Replica numbers, >= 0, ascending and each once.
        fan_out: Most members one passes an update on to, >= 1.

    Raises:
        OptionError: If an argument is outside what is allowed.

    Example:
        >>> routes = Routes(generation=3, members=(0, 1, 2, 5), fan_out=2)
        >>> routes.children(origin=5, node=5), routes.children(origin=5, node=0)
        ((0, 1), (2,))
        >>> routes.neighbours(0)
        (1, 2)
    """

    generation: int
    members: tuple[int, ...]
    fan_out: int = FAN_OUT

    def __post_init__(self) -> None:
        if self.generation < 0:
            raise OptionError(f"generation must be >= 0, got {self.generation}")
        if list(self.members) != sorted({m for m in self.members if m >= 0}):
            raise OptionError(
                f"members must be >= 0, ascending and unique, got {self.members}"
            )
        if self.fan_out < 1:
            raise OptionError(f"fan_out must be >= 1, got {self.fan_out}")

    def children(self, origin: int, node: int) -> tuple[int, ...]:
        """To whom a member passes on an update; nobody if either is no member.

        Args:
            origin: Replica whose update it is.
            node: Replica that has it; the origin itself at first.
        """
        root, index = self._index(origin), self._index(node)
        if root is None or index is None:
            return ()
        count = len(self.members)
        first = self.fan_out * ((index - root) % count) + 1
        positions = range(first, min(first + self.fan_out, count))
        return tuple(self.members[(root + p) % count] for p in positions)

    def neighbours(self, node: int) -> tuple[int, ...]:
        """Everyone a member has to send to for one origin or another, ascending.

        Beyond ``fan_out + 1`` members these are nearly all: 14 of 15, 56 of 63.
        """
        reached = {
            child for origin in self.members for child in self.children(origin, node)
        }
        return tuple(sorted(reached))

    def _index(self, replica: int) -> int | None:
        index = bisect_left(self.members, replica)
        found = index < len(self.members) and self.members[index] == replica
        return index if found else None


class RouteBook:
    """The routes of the latest generations, as one replica has heard of them.

    An update carries the generation in which its origin sent it, and goes along
    that generation's tree to the end: whoever was a member then gets it, once,
    although those on its way may have heard of a later generation. Before the
    first generation there is nobody to send to.

    All methods belong to the event loop; `current` may be read from any thread.

    Args:
        kept: How many generations are kept, >= 1; older ones are forgotten.

    Attributes:
        current: Routes of the highest generation heard of.

    Example:
        >>> book = RouteBook()
        >>> book.adopt(Routes(1, (0, 1)))
        True
        >>> book.adopt(Routes(2, (0, 1, 2)))
        True
        >>> book.for_generation(1).members, book.for_generation(9).members
        ((0, 1), (0, 1, 2))
    """

    current: Routes

    def __init__(self, kept: int = GENERATIONS_KEPT) -> None:
        if kept < 1:
            raise OptionError(f"kept must be >= 1, got {kept}")
        self.current = Routes(0, ())
        self._kept = kept
        self._known: dict[int, Routes] = {}

    def adopt(self, routes: Routes) -> bool:
        """Note the routes of a generation; whether they are the current ones now.

        Words about members may overtake each other: an older generation is kept
        for the frames stamped with it, and changes nothing else. The first word
        about a generation stays.
        """
        self._known.setdefault(routes.generation, routes)
        while len(self._known) > self._kept:
            del self._known[min(self._known)]
        newer = routes.generation > self.current.generation
        if newer:
            self.current = routes
        return newer

    def for_generation(self, generation: int) -> Routes:
        """The routes along which to forward what is stamped with a generation.

        One that is too old, or not heard of yet, falls back to the current one.
        The update may then reach somebody twice or not at all. Both are safe:
        positions know duplicates, and a gap is repaired by asking. It also ends:
        **only the first copy of an update may be forwarded**, so each replica
        forwards it once; with every copy it could circle between two that go by
        different trees.
        """
        return self._known.get(generation, self.current)
