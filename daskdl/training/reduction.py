"""The mean of what several replicas have, made along a tree of them.

Each fetches what those below it have added up, and adds its own; the root passes the
mean down again the same way. So nobody carries more than `fan_out` + 1 models in and
as many out, however many there are.
"""

from collections.abc import Callable, Sequence

import numpy as np

from daskdl.channel.base import Channel
from daskdl.channel.protocol import Arrays, Routes

BROKEN = "broken"  # the one name in what is passed on when somebody was lost


class Reduction:
    """One replica's part in a reduction.

    Args:
        channel: Of this replica.
        routes: Of those who take part; the generation tells reductions apart.
        root: Where the result is made.
        replica: This one.
    """

    def __init__(
        self, channel: Channel, routes: Routes, root: int, replica: int
    ) -> None:
        self._channel = channel
        self._children = routes.children(root, replica)
        above = [m for m in routes.members if replica in routes.children(root, m)]
        self._parent = above[0] if above else None
        self._number = routes.generation

    def result(
        self,
        own: Arrays,
        add: Callable[[Sequence[Arrays]], Arrays],
        finish: Callable[[Arrays], Arrays],
    ) -> Arrays | None:
        """Take part, and return the result.

        Args:
            own: What this replica adds; empty: nothing.
            add: Adds up several.
            finish: Makes the result of the sum; called at the root alone.

        Returns:
            None if somebody was lost who was needed. Others may have it even so.
        """
        total = self._total(own, add)
        if self._parent is None:
            result = None if total is None else finish(total)
        else:
            self._channel.offer(f"sum {self._number}", _or_broken(total))
            result = self._fetch(self._parent, f"mean {self._number}")
        if self._children:
            self._channel.offer(f"mean {self._number}", _or_broken(result))
        return result

    def _total(
        self, own: Arrays, add: Callable[[Sequence[Arrays]], Arrays]
    ) -> Arrays | None:
        shares = [own] if own else []
        whole = True
        for child in self._children:
            share = self._fetch(child, f"sum {self._number}")
            whole = whole and share is not None
            if share:
                shares.append(share)
        if not whole:
            return None
        return add(shares) if shares else {}

    def _fetch(self, replica: int, name: str) -> Arrays | None:
        fetched = self._channel.fetch(replica, name)
        return None if fetched is None or BROKEN in fetched else fetched


def _or_broken(arrays: Arrays | None) -> Arrays:
    return {BROKEN: np.empty(0)} if arrays is None else arrays
