"""The batches of a replica: leases, prefetching, shuffling, and bad parts."""

import dataclasses
import threading
import weakref
from concurrent.futures import CancelledError
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from distributed.utils import get_mp_context

from daskdl.channel.leasing import TO_ITS_END, Lease, Range
from daskdl.data.inputs import ReadOptions
from daskdl.errors import DataError
from daskdl.training.data_feed import Feed, Loader
from daskdl.training.telemetry import EpochTotals
from tests.support.problems import replica_spec

SPEC = replica_spec(torch.nn.Linear(1, 1), shuffle=False)


class Ranges(tuple):
    """Ranges of a lease that count how often one of them is read."""

    reads = 0

    def __getitem__(self, at):
        part = super().__getitem__(at)
        Ranges.reads += len(part) if isinstance(at, slice) else 1
        return part

    def __iter__(self):
        for batch in super().__iter__():
            Ranges.reads += 1
            yield batch


class Leasing:
    """A channel that hands out leases, and more of them to a replica that waits.

    Attributes:
        returned: Numbers of the returned leases.
        work: Work of each request.
        waits: Number of requests that waited.
    """

    def __init__(self, *leases, later=(), ahead=None):
        self._free, self._later = list(leases), list(later)
        self._ahead = ahead
        self._count = 0
        self.returned, self.work = [], []
        self.waits = 0

    def lease(self, phase, epoch, finished, *, wait, work):
        self.returned += [report["lease"] for report in finished]
        self.work.append(work)
        self.waits += wait
        if wait:
            self._free += self._later[:1]
            del self._later[:1]
        if not self._free:
            return None
        ranges = Ranges(Range(*bounds) for bounds in self._free.pop(0))
        self._count += 1
        parts = {r.part for r in ranges} | {self._ahead} - {None}
        keys = {part: f"key-{part}" for part in parts}
        return Lease(self._count - 1, ranges, keys, self._ahead)


class Store:
    """Parts of `rows` rows; row i of part p is 100 p + i.

    Attributes:
        alive: Parts in memory whenever one is loaded.
    """

    def __init__(self, rows=10, bad=()):
        self._rows, self._bad = rows, bad
        self.begun, self.kept, self.loaded, self.streamed = [], [], [], []
        self.alive = []
        self._refs = []

    def begin(self, phase, part, key):
        assert key == f"key-{part}"
        self.begun.append(part)

    def forget(self, phase, but):
        self.kept.append(list(but))

    def rows(self, phase, part, key):
        self.alive.append(sum(ref() is not None for ref in self._refs))
        self.loaded.append(part)
        if part in self._bad:
            raise ValueError("no rows to be had")
        numbers = 100 * part + np.arange(self._rows)
        x = numbers.astype(np.float32)
        self._refs.append(weakref.ref(x))
        return x, numbers

    def pieces(self, phase, part, key, skips):
        return []

    def name(self, phase, part):
        return f"part {part} of the {phase} data"

    def stream(self, phase, part, size, ahead):
        self.streamed.append((phase, part, size, ahead))
        for start in (0, 2):
            numbers = 100 * part + np.arange(start, start + 2)
            yield numbers.astype(np.float32), numbers


def feed(
    channel,
    store,
    batch_size=2,
    epoch=0,
    *,
    phase="train",
    take_logs=dict,
    skips=False,
    transform=None,
    **spec,
):
    bad = "skip" if skips else "raise"
    read = ReadOptions(batch_size, transform=transform, on_bad_batch=bad)
    feed_spec = dataclasses.replace(SPEC, read=read, **spec)
    return Feed(feed_spec, phase, epoch, channel, store, EpochTotals(), take_logs)


def numbers(batches):
    return [[int(i) for i in x] for x, _ in batches]


def rows_of(*leases, store=None, **options):
    """Return the rows of some leases, in one list."""
    data_feed = feed(Leasing(*leases), store or Store(), **options)
    return [row for batch in numbers(batches_of(data_feed)) for row in batch]


def batches_of(data_feed):
    """Yield all batches of a feed."""
    for group in data_feed.groups(lambda: None, size=1):
        yield from group


def test_groups_and_batches_span_leases_and_the_last_ones_may_be_smaller():
    data_feed = feed(Leasing([(0, 0, 3)], [(1, 0, 4)]), Store())

    groups = [numbers(group) for group in data_feed.groups(lambda: None, size=2)]

    assert groups == [[[0, 1], [2, 100]], [[101, 102], [103]]]


def test_a_lease_is_returned_only_after_the_step_with_its_last_row():
    channel = Leasing(*([(part, 0, 2)] for part in (0, 1, 2)))
    groups = feed(channel, Store()).groups(lambda: None, size=2)

    seen = [(numbers(group), list(channel.returned)) for group in groups]

    # The second lease was requested while the first had no step yet.
    assert seen == [([[0, 1], [100, 101]], []), ([[200, 201]], [0, 1])]
    assert channel.returned == [0, 1, 2]


def test_an_incomplete_group_is_trained_on_before_waiting_for_others():
    channel = Leasing([(0, 0, 2)], later=[[(1, 0, 2)]])
    events = []

    def rest():
        events.append(("rest", channel.waits))

    groups = feed(channel, Store()).groups(rest, size=3)
    events.extend((numbers(group), channel.waits) for group in groups)

    assert events == [([[0, 1]], 0), ("rest", 0), ([[100, 101]], 1), ("rest", 1)]


def test_each_batch_is_transformed_and_its_rows_are_counted_before():
    def halved(batch):
        x, y = batch
        return {"half": x[:1] / 2}, y  # of other rows than before

    channel = Leasing([(0, 0, 4)], [(1, 0, 1)])
    data_feed = feed(channel, Store(), transform=halved)

    seen = [
        ([x["half"].tolist() for x, _ in group], list(channel.returned))
        for group in data_feed.groups(lambda: None, size=2)
    ]

    assert seen == [([[0.0], [1.0]], []), ([[50.0]], [0])]
    assert channel.returned == [0, 1]


def train(data_feed, size=1, logs=None):
    """Step on each group, with a loss of 1 for each row; yield after each step."""
    for group in data_feed.groups(lambda: None, size):
        data_feed.totals.loss_sum += data_feed.rows
        data_feed.totals.examples += data_feed.rows
        if logs is not None:
            logs.append(data_feed.rows)
        yield group


def test_what_is_handed_over_is_the_work_on_finished_leases():
    channel = Leasing([(0, 0, 3)], [(1, 0, 4)], [(2, 0, 1)])
    data_feed = feed(channel, Store())

    for _ in train(data_feed):
        pass

    work = [(report["examples"], report["loss_sum"]) for report in channel.work]
    # The first lease ends within the second batch, with three batches trained on.
    assert work == [(0, 0.0), (0, 0.0), (3, 3.0), (8, 8.0), (8, 8.0)]
    assert channel.returned == [0, 1, 2]


def test_rows_made_by_a_transform_count_in_proportion_to_the_rows_of_a_lease():
    def doubled(batch):
        return tuple(each.repeat(2) for each in batch)

    channel = Leasing([(0, 0, 3)], [(1, 0, 4)], [(2, 0, 1)])

    for _ in train(feed(channel, Store(), transform=doubled)):
        pass

    assert [report["examples"] for report in channel.work] == [0, 0, 6, 16, 16]


def test_skipped_rows_are_handed_over_with_their_lease():
    channel = Leasing([(0, 0, 3)], [(1, 0, 3), (2, 0, 4)], [(3, 0, 1)])
    data_feed = feed(channel, Store(bad=[1]), skips=True)

    for _ in train(data_feed):
        pass

    # The bad part is read before the batch in which the first lease ends.
    work = [(report["examples"], report["skipped"]) for report in channel.work]
    assert work == [(0, 0), (0, 0), (3, 0), (8, 3), (8, 3)]
    assert channel.work[-1]["reason"] == data_feed.totals.reason != ""


def test_dropped_rows_are_handed_over_and_are_no_examples():
    channel = Leasing([(0, 0, 3)], [(1, 0, 2)])

    for _ in train(feed(channel, Store(), drop_last=True)):
        pass

    work = [(report["examples"], report["dropped"]) for report in channel.work]
    assert work == [(0, 0), (0, 0), (3, 0), (4, 1)]


def test_what_steps_log_is_handed_over_with_each_request():
    logs = []

    def take_logs():
        taken, logs[:] = {"kl": (2.0 * sum(logs), sum(logs))}, []
        return taken

    channel = Leasing([(0, 0, 2)], [(1, 0, 2)])
    data_feed = feed(channel, Store(), take_logs=take_logs)

    for _ in train(data_feed, logs=logs):
        pass

    assert channel.work[-1]["logs"] == {"kl": (8.0, 4)}


def test_a_stop_is_handed_over_with_what_was_trained_until_then():
    channel = Leasing([(0, 0, 8)])
    data_feed = feed(channel, Store())

    for _ in train(data_feed):
        data_feed.totals.stop = "enough"

    assert (channel.work[-1]["stop"], channel.work[-1]["examples"]) == ("enough", 2)
    assert channel.returned == [0]
    assert channel.waits == 1


def test_validation_leases_are_returned_with_the_scores_alone():
    channel = Leasing([(0, 0, 2)], [(1, 0, 3)], later=[[(2, 0, 2)]])
    data_feed = feed(channel, Store(), phase="validation")

    first = numbers(data_feed.batches())
    assert channel.returned == []
    more = data_feed.hand_over("scores of 0 and 1")
    assert (first, more) == ([[0, 1], [100, 101], [102]], True)
    assert channel.returned == [0, 1]
    assert numbers(data_feed.batches()) == [[200, 201]]
    assert not data_feed.hand_over("scores of all")

    assert [work for work in channel.work if work] == [
        "scores of 0 and 1",
        "scores of all",
    ]
    assert channel.returned == [0, 1, 2]


def test_an_unreadable_part_is_loaded_once_counted_and_its_lease_returned():
    store = Store(bad=[1])
    channel = Leasing([(0, 0, 2)], [(1, 0, 3)], [(2, 0, 2), (1, 3, 5)])
    data_feed = feed(channel, store, skips=True, prefetch=1)

    assert numbers(batches_of(data_feed)) == [[0, 1], [200, 201]]
    assert data_feed.totals.skipped == 5
    assert channel.returned == [0, 1, 2]
    assert (store.loaded.count(1), store.begun.count(1)) == (1, 1)


class Partial(Store):
    """A store whose bad parts have one good file of four rows."""

    def pieces(self, phase, part, key, skips):
        x = np.arange(4, dtype=np.float32) + 100 * part
        return [("a good file", (x, x))]


def test_rows_of_bad_files_are_counted_once_over_several_leases():
    leases = [[(1, start, start + 3)] for start in (0, 3, 6)]
    data_feed = feed(Leasing(*leases), Partial(bad=[1]), skips=True)

    rows = [row for batch in numbers(data_feed.batches()) for row in batch]

    assert rows == [100, 101, 102, 103]
    assert data_feed.totals.skipped == 9 - 4


@pytest.mark.parametrize(
    ("prefetch", "kept"),
    [
        (0, [[0], [1], [2], [3]]),
        (1, [[0, 1], [1, 2], [2, 3], [3]]),
        (2, [[0, 1, 2], [1, 2, 3], [2, 3], [3]]),
        (9, [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]),
    ],
)
def test_parts_with_prefetch_batches_are_loaded_ahead(prefetch, kept):
    store = Store()

    rows_of([(part, 0, 2) for part in range(4)], store=store, prefetch=prefetch)

    assert store.kept == kept
    assert store.begun == [part for now in kept for part in now]


@pytest.mark.parametrize(("prefetch", "begun"), [(0, [5]), (1, [5, 7]), (2, [5, 7])])
def test_at_the_end_of_a_lease_the_part_that_probably_follows_is_loaded(
    prefetch, begun
):
    store = Store()

    next(feed(Leasing([(5, 0, 2)], ahead=7), store, prefetch=prefetch).batches())

    assert store.begun == begun


def test_the_time_per_part_does_not_grow_with_the_parts_of_a_lease():
    Ranges.reads = 0

    rows = rows_of([(part, 0, 1) for part in range(400)], batch_size=4)

    assert len(rows) == 400
    assert Ranges.reads <= 400 * 3 * (2 * 4 + 1)  # rows of two batches ahead, not 400


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_part_is_freed_before_the_next_one_is_loaded(shuffle):
    store = Store(rows=8)
    data_feed = feed(Leasing([(p, 0, 8) for p in range(3)]), store, shuffle=shuffle)

    for _ in batches_of(data_feed):
        pass

    assert store.alive == [0, 0, 0]


def test_the_order_of_a_part_depends_on_seed_epoch_and_part_only():
    whole = rows_of([(1, 0, 10)], shuffle=True)

    assert rows_of([(1, 0, 4)], shuffle=True) == whole[:4]
    assert rows_of([(0, 0, 1), (1, 4, 10)], shuffle=True)[1:] == whole[4:]
    assert sorted(whole) == list(range(100, 110)) != whole
    others = [
        rows_of([(2, 0, 10)], shuffle=True),
        rows_of([(1, 0, 10)], shuffle=True, epoch=1),
        rows_of([(1, 0, 10)], shuffle=True, seed=1),
    ]
    orders = {tuple(row % 100 for row in rows) for rows in [whole, *others]}
    assert len(orders) == 4


def test_the_epochs_of_earlier_fits_count_for_the_order():
    first = rows_of([(1, 0, 10)], shuffle=True)

    second = rows_of([(1, 0, 10)], shuffle=True, epochs_before=1)

    assert first != second == rows_of([(1, 0, 10)], shuffle=True, epoch=1)


@pytest.mark.parametrize("option", ["shuffle", "drop_last"])
def test_rows_of_the_validation_are_neither_shuffled_nor_dropped(option):
    rows = rows_of([(1, 0, 9)], phase="validation", batch_size=4, **{option: True})

    assert rows == [*range(100, 109)]


def test_leases_of_dropped_rows_are_returned():
    channel = Leasing([(0, 0, 5)])
    data_feed = feed(channel, Store(), batch_size=4, drop_last=True)

    groups = [numbers(group) for group in data_feed.groups(lambda: None, size=1)]

    assert groups == [[[0, 1, 2, 3]]]
    assert data_feed.totals.dropped == 1
    assert channel.returned == [0]


def test_the_first_reason_for_leaving_rows_out_is_kept():
    class Worse(Store):
        def rows(self, phase, part, key):
            raise ValueError(f"no rows in {part}")

    data_feed = feed(Leasing([(3, 0, 2)], [(5, 0, 2)]), Worse(), skips=True)

    assert numbers(data_feed.batches()) == []
    assert "no rows in 3" in data_feed.totals.reason


def test_a_part_of_unknown_length_is_streamed():
    store = Store()

    rows = rows_of([(1, 0, TO_ITS_END)], store=store, batch_size=4, prefetch=3)

    assert rows == [100, 101, 102, 103]
    assert store.streamed == [("train", 1, 4, 3)]
    assert (store.begun, store.loaded) == ([], [])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_part_with_fewer_rows_than_before_is_an_error(shuffle):
    batches = feed(
        Leasing([(3, 0, 4), (3, 4, 8)]), Store(rows=5), batch_size=4, shuffle=shuffle
    ).batches()
    next(batches)

    with pytest.raises(
        DataError, match="part 3 of the train data has 5 rows, but had at"
    ):
        next(batches)


WHO = ContextVar("who", default="nobody")
PATIENCE_S = 30  # of a test that would fail otherwise


@pytest.fixture
def loader():
    loader = Loader(1, "test-loader")
    yield loader
    loader.close()


def threads():
    return [t for t in threading.enumerate() if t.name == "test-loader"]


def join():
    for thread in threads():
        thread.join(PATIENCE_S)


def test_a_job_runs_in_the_callers_context(loader):
    token = WHO.set("a task")
    try:
        future = loader.submit(WHO.get)
    finally:
        WHO.reset(token)

    assert future.result(PATIENCE_S) == "a task"
    assert loader.submit(WHO.get).result(PATIENCE_S) == "nobody"


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
def test_a_job_that_raises_does_not_stop_the_loader(loader, error):
    def fail():
        raise error

    failed, after = loader.submit(fail), loader.submit(lambda: 5)

    assert after.result(PATIENCE_S) == 5
    assert failed.exception(PATIENCE_S) is error


def test_close_lets_the_running_job_end_and_cancels_the_others(loader):
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


def begin_to_hang():
    begun = threading.Event()
    Loader(1, "x").submit(lambda: (begun.set(), threading.Event().wait()))
    assert begun.wait(PATIENCE_S)


def test_a_hanging_job_does_not_keep_the_process_alive():
    process = get_mp_context().Process(target=begin_to_hang)
    process.start()
    process.join(PATIENCE_S)

    ended = process.exitcode
    process.kill()
    assert ended == 0
