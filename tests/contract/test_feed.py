"""Groups of batches from leased pieces, and when a piece is given back."""

import numpy as np

from daskdl.channel.leasing import Lease, Range
from daskdl.training.data_feed import Feed, Reading
from daskdl.training.telemetry import EpochTotals


class Leasing:
    """Hands out ranges as pieces; more of them come, or not, to whoever waits.

    Attributes:
        returned: What was given back, and at which waits or requests.
    """

    def __init__(self, pieces, later=()):
        self._free, self._later = list(pieces), list(later)
        self._count = 0
        self.returned = []
        self.waits = 0

    def lease(self, phase, epoch, finished, *, wait):
        self.returned += [piece["lease"] for piece in finished]
        self.waits += wait
        if wait:
            self._free += self._later[:1]
            del self._later[:1]
        if not self._free:
            return None
        ranges = tuple(Range(*one) for one in self._free.pop(0))
        self._count += 1
        return Lease(self._count - 1, ranges, {r.part: "key" for r in ranges})


class Rows:
    """Parts of so many rows; row i of part p is 100 p + i."""

    def __init__(self, *lengths):
        self._lengths = lengths

    def begin(self, phase, part, key):
        """Nothing has to be loaded."""

    def forget(self, phase, but):
        """Likewise."""

    def separate(self, phase, part, key, skips):
        """No part is made of files."""
        return []

    def name(self, phase, part):
        return f"part {part}"

    def rows(self, phase, part, key):
        numbers = 100 * part + np.arange(self._lengths[part])
        return numbers.astype(np.float32), numbers


def feed(channel, store, transform=None, **changes):
    options = {"seed": None, "batch_size": 2, "prefetch": 2, "labels": None}
    reading = Reading("train", **{**options, "skips": False, **changes})
    return Feed(channel, 0, store, reading, EpochTotals(), transform)


def numbers(group):
    return [[int(i) for i in x] for x, _ in group]


def test_groups_and_batches_go_across_pieces_and_the_last_have_what_is_left():
    own = feed(Leasing([[(0, 0, 3)], [(1, 0, 4)]]), Rows(3, 4))

    groups = [numbers(group) for group in own.groups(lambda: None, size=2)]

    assert groups == [[[0, 1], [2, 100]], [[101, 102], [103]]]


def test_a_piece_is_given_back_only_after_the_step_with_its_last_row():
    channel = Leasing([[(p, 0, 2)] for p in (0, 1, 2)])
    groups = feed(channel, Rows(2, 2, 2)).groups(lambda: None, size=2)

    seen = [(numbers(group), list(channel.returned)) for group in groups]

    # The second piece was asked for while the first had no step yet.
    assert seen == [([[0, 1], [100, 101]], []), ([[200, 201]], [0, 1])]
    assert channel.returned == [0, 1, 2]


def test_what_is_left_is_stepped_before_anybody_is_waited_for():
    channel = Leasing([[(0, 0, 2)]], later=[[(1, 0, 2)]])
    events = []

    def rest():
        events.append(("rest", channel.waits))

    groups = feed(channel, Rows(2, 2)).groups(rest, size=3)
    events.extend((numbers(group), channel.waits) for group in groups)

    assert events == [([[0, 1]], 0), ("rest", 0), ([[100, 101]], 1), ("rest", 1)]


def test_each_batch_is_transformed_and_its_rows_are_counted_before():
    def halved(batch):
        x, y = batch
        return {"half": x[:1] / 2}, y  # of other rows than before

    channel = Leasing([[(0, 0, 4)], [(1, 0, 1)]])
    own = feed(channel, Rows(4, 1), halved)

    seen = [
        ([x["half"].tolist() for x, _ in group], list(channel.returned))
        for group in own.groups(lambda: None, size=2)
    ]

    assert seen == [([[0.0], [1.0]], []), ([[50.0]], [0])]
    assert channel.returned == [0, 1]


def test_a_part_that_cannot_be_read_is_counted_and_given_back():
    class Damaged(Rows):
        def rows(self, phase, part, key):
            if part == 1:
                raise ValueError("no rows to be had")
            return super().rows(phase, part, key)

    channel = Leasing([[(0, 0, 2)], [(1, 0, 3)], [(2, 0, 2)]])
    own = feed(channel, Damaged(2, 3, 2), skips=True)

    got = [numbers([batch]) for batch in own.batches()]

    assert got == [[[0, 1]], [[200, 201]]]
    assert own.totals.skipped == 3
    assert channel.returned == [0, 1, 2]
