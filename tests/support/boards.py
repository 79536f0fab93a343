"""What replicas of one process let each other fetch, without a run."""

import threading
from collections import Counter
from functools import partial

PATIENCE_S = 30  # of a test that would hang otherwise


class Board:
    """What all offer; what a lost one offers never comes."""

    def __init__(self, lost=()):
        self._changed = threading.Condition()
        self._there = {}
        self._lost = set(lost)
        self.fetches = Counter()  # by who fetched

    def offer(self, replica, name, arrays):
        with self._changed:
            self._there[replica, name] = arrays
            self._changed.notify_all()

    def fetch(self, asking, replica, name):
        key = (replica, name)
        self.fetches[asking] += 1
        with self._changed:
            over = self._changed.wait_for(
                lambda: key in self._there or replica in self._lost, PATIENCE_S
            )
            assert over, f"{name} of replica {replica} did not come to {asking}"
            return self._there.get(key)


class Channel:
    """As much of a channel as a reduction needs."""

    def __init__(self, board, replica):
        self.publish_blob = partial(board.offer, replica)
        self.fetch_blob = partial(board.fetch, replica)
