"""Whether more calls are to be waited for. A number of calls, no clock."""

from collections import deque

MEMORY = 8  # batches: fewer callers than before cost as many waits, once


class Crowd:
    """How many calls are without an answer at once, lately.

    Callers that wait for their answer before they call again are a crowd of a certain
    size. When all of them are there already nobody else will come, and to wait would
    only cost them time: one caller alone is answered at once.

    Example:
        >>> crowd = Crowd()
        >>> crowd.complete(1)
        True
        >>> crowd.came(3)
        >>> crowd.complete(2), crowd.complete(3)
        (False, True)
    """

    def __init__(self) -> None:
        self._sizes: deque[int] = deque([1], maxlen=MEMORY)
        self._peak = 0  # since the last batch left

    def came(self, unanswered: int) -> None:
        """A call has come; with it, so many have no answer."""
        self._peak = max(self._peak, unanswered)

    def left(self) -> None:
        """A batch leaves."""
        self._sizes.append(self._peak)
        self._peak = 0

    def complete(self, unanswered: int) -> bool:
        """Whether that are as many as there were lately."""
        return unanswered >= max(self._peak, *self._sizes)
