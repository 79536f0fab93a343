"""Groups of batches from leased pieces, and when a piece is given back.

From leased pieces to rows: what is loaded when, and what of it is used.

What a reader makes of the ranges of a piece, however many and however bad.

What the options of a run say of how its data are read.

Threads that load data beside training.
"""

import dataclasses
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from contextvars import ContextVar

import numpy as np
import pytest
import torch

from daskdl import GradientSharing
from daskdl.channel.leasing import TO_ITS_END, Lease, Range
from daskdl.data.batching import batches
from daskdl.data.inputs import ReadOptions
from daskdl.errors import (
    DataError,
)
from daskdl.training.data_feed import Feed, Loader, Reader, Reading
from daskdl.training.epoch_control import EvaluationPlan
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.telemetry import EpochTotals
from tests.support.run_states import TIMEOUTS


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
        numbers_read = 100 * part + np.arange(self._rows)
        return numbers_read.astype(np.float32), numbers_read % 10

    def separate(self, phase, part, key, skips):
        return []

    def name(self, phase, part):
        return f"part {part} of the {phase} data"

    def stream(self, phase, part, size, ahead):
        self.streamed.append((phase, part, size, ahead))
        for start in (0, 2):
            numbers_read = 100 * part + np.arange(start, start + 2)
            yield numbers_read.astype(np.float32), numbers_read % 10


def piece(*ranges, ahead=None):
    parts = {one[0] for one in ranges} | {ahead} - {None}
    keys = {part: f"key-{part}" for part in parts}
    return Lease(0, tuple(Range(*one) for one in ranges), keys, ahead)


def reader(store, **changes):
    return Reader(store, dataclasses.replace(READING, **changes), EpochTotals())


def numbers_read(chunks):
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

    @pytest.mark.parametrize(
        ("prefetch", "begun"), [(0, [5]), (1, [5, 7]), (2, [5, 7])]
    )
    def test_at_the_end_of_a_piece_the_part_that_probably_follows_is(
        self, prefetch, begun
    ):
        store = Noting()

        next(reader(store, prefetch=prefetch).chunks(piece((5, 0, 2), ahead=7)))

        assert store.begun == begun

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

        (first,) = numbers_read(one.chunks(piece((1, 0, 4))))
        (second,) = numbers_read(other.chunks(piece((1, 4, 10))))
        (whole,) = numbers_read(other.chunks(piece((1, 0, 10))))

        assert first + second == whole
        assert sorted(whole) == list(range(100, 110))
        assert whole != sorted(whole)

    def test_each_part_and_each_epoch_has_another(self):
        orders = [
            [
                i % 100
                for i in numbers_read(reader(Noting(), seed=s).chunks(piece(r)))[0]
            ]
            for s, r in [
                ((1, 0), (1, 0, 10)),
                ((1, 0), (2, 0, 10)),
                ((1, 1), (1, 0, 10)),
            ]
        ]

        assert len({tuple(order) for order in orders}) == 3


class TestSkipping:
    def test_it_is_not_asked_for_again(self):
        store = Noting(errors={1: DataError("bad")})
        own = reader(store, skips=True, prefetch=1)

        for _ in range(2):
            list(own.chunks(piece((1, 0, 2), (2, 0, 2))))

        assert [part for _, part, _ in store.loaded].count(1) == 1
        assert store.begun.count(1) == 1


class TestStream:
    def test_a_part_without_a_known_length_comes_bit_by_bit(self):
        store = Noting()
        own = reader(store, batch_size=4, prefetch=3)

        got = numbers_read(own.chunks(piece((1, 0, TO_ITS_END))))

        assert got == [[100, 101], [102, 103]]
        assert store.streamed == [("train", 1, 4, 3)]
        assert (store.begun, store.loaded) == ([], [])


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


OPTIONS = ReplicaSpec(
    objective=torch.nn.functional.mse_loss,
    optimizer=torch.optim.SGD,
    read=ReadOptions(8, on_bad_batch="skip"),
    model=torch.nn.Linear(1, 1),
    rows=(None, None),
    run=1,
    master=GradientSharing(),
    epochs=3,
    epochs_before=4,
    seed=7,
    evaluation=EvaluationPlan(3, validates=True),
    size=10,
    grid=1e-3,
    outbox_bytes=1,
    inbox_bytes=1,
    timeouts=TIMEOUTS,
    prefetch=5,
)


def options(**changes):
    return dataclasses.replace(OPTIONS, **changes)


WHO = ContextVar("who", default="nobody")
PATIENCE_S = 30  # of a test that would fail otherwise


@pytest.fixture
def loader():
    own = Loader(1, "test-loader")
    yield own
    own.close()


def threads():
    return [t for t in threading.enumerate() if t.name == "test-loader"]


def join():
    for thread in threads():
        thread.join(PATIENCE_S)


def test_a_job_finds_the_context_of_who_asked_for_it(loader):
    token = WHO.set("a task")
    try:
        future = loader.submit(WHO.get)
    finally:
        WHO.reset(token)

    assert future.result(PATIENCE_S) == "a task"
    assert loader.submit(WHO.get).result(PATIENCE_S) == "nobody"


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
def test_what_a_job_raises_is_the_futures_and_the_next_one_runs(loader, error):
    def fail():
        raise error

    failed, after = loader.submit(fail), loader.submit(lambda: 5)

    assert after.result(PATIENCE_S) == 5
    assert failed.exception(PATIENCE_S) is error


def test_after_close_the_job_that_runs_ends_and_no_other_begins(loader):
    begun, held, ran = threading.Event(), threading.Event(), []

    def job():
        begun.set()
        return held.wait(PATIENCE_S)

    first, second = loader.submit(job), loader.submit(lambda: ran.append(2))
    assert begun.wait(PATIENCE_S)
    loader.close()
    held.set()
    join()

    assert first.result(PATIENCE_S)
    with pytest.raises(CancelledError):
        second.result(PATIENCE_S)
    assert (ran, threads()) == ([], [])


def test_a_job_that_hangs_does_not_keep_a_process_from_ending():
    code = (
        "import threading; from daskdl.training.data_feed import Loader; "
        "begun = threading.Event(); "
        "Loader(1, 'x').submit(lambda: (begun.set(), threading.Event().wait())); "
        "begun.wait(); print('over')"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50
    )

    assert (done.stdout, done.returncode) == ("over\n", 0)
