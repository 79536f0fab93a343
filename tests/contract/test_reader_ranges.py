"""What a reader makes of the ranges of a piece, however many and however bad."""

import weakref

import numpy as np
import pytest

from daskdl.channel.leasing import TO_ITS_END, Lease, Range
from daskdl.data.batching import batches
from daskdl.errors import DataError
from daskdl.training.data_feed import Reader, Reading
from daskdl.training.telemetry import EpochTotals


class Store:
    """Parts of so many rows each; notes what is begun."""

    def __init__(self, rows=1, bits=()):
        self.begun = []
        self.wanted = set()
        self._rows, self._bits = rows, bits

    def forget(self, phase, but):
        self.wanted = set(but)

    def begin(self, phase, part, key):
        self.begun.append(part)

    def rows(self, phase, part, key):
        return np.zeros((self._rows, 2), np.float32), np.zeros(self._rows, np.int64)

    def separate(self, phase, part, key, skips):
        return []

    def name(self, phase, part):
        return f"part {part} of the {phase} data"

    def stream(self, phase, part, size, ahead):
        for bit in self._bits:
            if isinstance(bit, Exception):
                raise bit
            yield np.full((bit, 2), part, np.float32), np.zeros(bit, np.int64)


class Counted(tuple):
    """Ranges that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Counted.looks += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self):
        for one in super().__iter__():
            Counted.looks += 1
            yield one


def reading(skips=False, prefetch=2, seed=None):
    return Reading("train", seed, 4, prefetch, None, skips)


def reader_of(store, reading):
    return Reader(store, reading, EpochTotals())


def piece_of(*ranges, ahead=None):
    parts = {one[0]: "" for one in ranges} | ({} if ahead is None else {ahead: ""})
    return Lease(0, Counted(Range(*one) for one in ranges), parts, ahead)


def test_many_small_parts_do_not_take_longer_each():
    piece = piece_of(*((part, 0, 1) for part in range(400)))
    Counted.looks = 0

    chunks = list(reader_of(Store(), reading()).chunks(piece))

    assert len(chunks) == 400
    assert Counted.looks <= 400 * 3 * (2 * 4 + 1)  # rows of two batches ahead, not 400


@pytest.mark.parametrize("seed", [None, (0, 0)], ids=["in order", "shuffled"])
def test_rows_that_are_not_there_are_an_error(seed):
    reader = reader_of(Store(rows=5), reading(seed=seed))
    chunks = reader.chunks(piece_of((3, 0, 4), (3, 4, 8)))
    next(chunks)

    with pytest.raises(DataError, match="part 3 of the train data has 5 rows now"):
        next(chunks)


def test_the_rest_of_a_bad_stream_is_left_out_if_it_may_be():
    reader = reader_of(Store(bits=[4, ValueError("torn")]), reading(skips=True))

    chunks = list(reader.chunks(piece_of((0, 0, TO_ITS_END), (1, 0, TO_ITS_END))))

    assert [chunk.rows[0][0, 0] for chunk in chunks] == [0, 1]


def test_an_error_of_a_stream_says_which_part_it_is_of():
    reader = reader_of(Store(bits=[ValueError("torn")]), reading())

    with pytest.raises(ValueError, match="torn") as caught:
        list(reader.chunks(piece_of((5, 0, TO_ITS_END))))

    assert caught.value.__notes__ == ["in part 5 of the train data"]


class Watched(Store):
    """Knows which parts are in memory when one is loaded, or more of a stream is."""

    def __init__(self, **options):
        super().__init__(**options)
        self.there = []
        self._alive = []

    def _watch(self, rows):
        self._alive.append(weakref.ref(rows[0]))
        return rows

    def rows(self, phase, part, key):
        self.there.append(sum(one() is not None for one in self._alive))
        return self._watch(super().rows(phase, part, key))

    def stream(self, phase, part, size, ahead):
        bits = super().stream(phase, part, size, ahead)
        while (rows := next(bits, None)) is not None:
            self.there.append(sum(one() is not None for one in self._alive))
            yield self._watch(rows)
            del rows


@pytest.mark.parametrize("seed", [None, (0, 0)], ids=["in order", "shuffled"])
def test_a_part_that_is_done_with_is_gone_when_the_next_is_waited_for(seed):
    store = Watched(rows=8)
    chunks = reader_of(store, reading(seed=seed)).chunks(
        piece_of((0, 0, 8), (1, 0, 8), (2, 0, 8))
    )

    for _ in batches(chunks, 4):
        pass

    assert store.there == [0, 0, 0]


def test_what_has_come_of_a_stream_is_gone_likewise():
    store = Watched(bits=[8, 8, 8])
    chunks = reader_of(store, reading()).chunks(piece_of((0, 0, TO_ITS_END)))

    for _ in batches(chunks, 4):
        pass

    assert store.there == [0, 0, 0]
