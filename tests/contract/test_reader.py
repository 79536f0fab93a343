"""From leased pieces to rows: what is loaded when, and what of it is used."""

import dataclasses
import weakref

import numpy as np
import pytest

from daskdl.channel.leasing import TO_ITS_END, Lease, Range
from daskdl.data.checks import LabelCheck
from daskdl.errors import (
    ChannelError,
    DataError,
    LostPieceError,
    OptionError,
    WaitTimeoutError,
)
from daskdl.training.data_feed import Reader, Reading
from daskdl.training.telemetry import EpochTotals

READING = Reading(
    phase="train", seed=None, batch_size=2, prefetch=2, labels=None, skips=False
)


class Noting:
    """A store of parts of so many rows that notes what it is asked for.

    Row i of part p is 100 p + i, and so is its label modulo 10.
    """

    def __init__(self, rows=10, errors=()):
        self._rows = rows
        self._errors = dict(errors)
        self.begun, self.kept, self.loaded, self.streamed = [], [], [], []

    def begin(self, phase, part, key):
        assert key == f"key-{part}"
        self.begun.append(part)

    def forget(self, phase, but):
        self.kept.append(list(but))

    def rows(self, phase, part, key):
        self.loaded.append((phase, part, key))
        if part in self._errors:
            raise self._errors[part]
        numbers = 100 * part + np.arange(self._rows)
        return numbers.astype(np.float32), numbers % 10

    def separate(self, phase, part, key, skips):
        return []

    def name(self, phase, part):
        return f"part {part} of the {phase} data"

    def stream(self, phase, part, size, ahead):
        self.streamed.append((phase, part, size, ahead))
        for start in (0, 2):
            numbers = 100 * part + np.arange(start, start + 2)
            yield numbers.astype(np.float32), numbers % 10


def piece(*ranges, ahead=None):
    parts = {one[0] for one in ranges} | {ahead} - {None}
    keys = {part: f"key-{part}" for part in parts}
    return Lease(0, tuple(Range(*one) for one in ranges), keys, ahead)


def reader(store, **changes):
    return Reader(store, dataclasses.replace(READING, **changes), EpochTotals())


def numbers(chunks):
    return [[int(i) for i in chunk.between(0, chunk.length)[0]] for chunk in chunks]


FOUR = [(p, 0, 2) for p in range(4)]


class TestAhead:
    @pytest.mark.parametrize(
        ("prefetch", "kept"),
        [
            (0, [[0], [1], [2], [3]]),
            (1, [[0, 1], [1, 2], [2, 3], [3]]),
            (2, [[0, 1, 2], [1, 2, 3], [2, 3], [3]]),
            (9, [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]),
        ],
    )
    def test_parts_with_rows_of_so_many_batches_are_begun(self, prefetch, kept):
        store = Noting()

        list(reader(store, prefetch=prefetch).chunks(piece(*FOUR)))

        assert store.kept == kept
        assert store.begun == [part for now in kept for part in now]

    def test_the_next_part_is_begun_in_any_case(self):
        store = Noting()

        next(reader(store, prefetch=1).chunks(piece((0, 0, 2), (1, 0, 9), (2, 0, 2))))

        assert store.begun == [0, 1]

    @pytest.mark.parametrize(
        ("prefetch", "begun"), [(0, [5]), (1, [5, 7]), (2, [5, 7])]
    )
    def test_at_the_end_of_a_piece_the_part_that_probably_follows_is(
        self, prefetch, begun
    ):
        store = Noting()

        next(reader(store, prefetch=prefetch).chunks(piece((5, 0, 2), ahead=7)))

        assert store.begun == begun

    def test_it_is_not_before_the_end(self):
        store = Noting()

        list(reader(store, prefetch=1).chunks(piece(*FOUR[:2], ahead=7)))

        assert store.kept == [[0, 1], [1, 7]]

    def test_a_part_that_is_held_is_neither_begun_nor_loaded_again(self):
        store = Noting()
        own = reader(store, prefetch=0)

        got = numbers(own.chunks(piece((1, 0, 2), (1, 2, 4))))
        got += numbers(own.chunks(piece((1, 4, 5))))

        assert got == [[100, 101], [102, 103], [104]]
        assert store.begun == [1]
        assert store.loaded == [("train", 1, "key-1")]

    def test_one_part_is_let_go_of_before_the_next_is_waited_for(self):
        held = []

        class Weak(Noting):
            def rows(self, phase, part, key):
                held.append([ref() is not None for ref in refs])
                rows = super().rows(phase, part, key)
                refs.append(weakref.ref(rows[0]))
                return rows

        refs = []
        for _ in reader(Weak(), prefetch=0).chunks(piece(*FOUR[:3])):
            del _

        assert held == [[], [False], [False, False]]


class TestOrder:
    def test_a_seed_gives_each_part_an_order_whoever_reads_which_of_it(self):
        one, other = (reader(Noting(), seed=(1, 0)) for _ in range(2))

        (first,) = numbers(one.chunks(piece((1, 0, 4))))
        (second,) = numbers(other.chunks(piece((1, 4, 10))))
        (whole,) = numbers(other.chunks(piece((1, 0, 10))))

        assert first + second == whole
        assert sorted(whole) == list(range(100, 110))
        assert whole != sorted(whole)

    def test_each_part_and_each_epoch_has_another(self):
        orders = [
            [i % 100 for i in numbers(reader(Noting(), seed=s).chunks(piece(r)))[0]]
            for s, r in [
                ((1, 0), (1, 0, 10)),
                ((1, 0), (2, 0, 10)),
                ((1, 1), (1, 0, 10)),
            ]
        ]

        assert len({tuple(order) for order in orders}) == 3


class TestLabels:
    TWO = LabelCheck(2, -100)

    def test_those_of_a_stream_are_looked_at_too(self):
        own = reader(Noting(), labels=self.TWO)
        chunks = own.chunks(piece((3, 0, TO_ITS_END)))

        assert next(chunks).length == 2
        with pytest.raises(DataError, match="y of part 3 of the train data"):
            next(chunks)


class TestSkipping:
    def test_it_is_not_asked_for_again(self):
        store = Noting(errors={1: DataError("bad")})
        own = reader(store, skips=True, prefetch=1)

        for _ in range(2):
            list(own.chunks(piece((1, 0, 2), (2, 0, 2))))

        assert [part for _, part, _ in store.loaded].count(1) == 1
        assert store.begun.count(1) == 1

    @pytest.mark.parametrize(
        "error",
        [
            WaitTimeoutError("slow"),
            LostPieceError("gone"),
            ChannelError("over"),
            OptionError("install it"),
        ],
        ids=repr,
    )
    def test_what_is_not_the_datas_fault_is_not_left_out(self, error):
        own = reader(Noting(errors={1: error}), skips=True)

        with pytest.raises(type(error)):
            list(own.chunks(piece((1, 0, 2))))


class TestStream:
    def test_a_part_without_a_known_length_comes_bit_by_bit(self):
        store = Noting()
        own = reader(store, batch_size=4, prefetch=3)

        got = numbers(own.chunks(piece((1, 0, TO_ITS_END))))

        assert got == [[100, 101], [102, 103]]
        assert store.streamed == [("train", 1, 4, 3)]
        assert (store.begun, store.loaded) == ([], [])

    def test_its_rows_are_not_shuffled(self):
        own = reader(Noting(), seed=(1, 0))

        got = numbers(own.chunks(piece((1, 0, TO_ITS_END))))

        assert got == [[100, 101], [102, 103]]
