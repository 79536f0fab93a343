"""Each row goes into one batch file, whoever reads which bucket."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.data.shuffle_plan import ShufflePlan

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum)
SEEDS = st.none() | st.integers(0, 9)


def dealt(plan, lengths, buckets=None):
    """The rows of each file, numbered in the order of the pieces, by file."""
    firsts = np.cumsum([0, *lengths])
    files = {}
    for bucket in buckets or range(plan.buckets):
        spans = plan.spans(bucket)
        rows = np.concatenate([firsts[p] + np.arange(a, b) for p, a, b in spans])
        for file, indices in zip(plan.files_of(bucket), plan.cuts(bucket), strict=True):
            files[file] = rows[indices].tolist()
    return files


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), SEEDS)
def test_each_row_is_in_one_file_and_all_but_the_last_are_full(
    lengths, file_rows, bucket_rows, seed
):
    plan = ShufflePlan(lengths, file_rows, bucket_rows, seed)

    files = dealt(plan, lengths)

    rows = [row for file in range(plan.files) for row in files[file]]
    sizes = [len(files[file]) for file in range(plan.files)]
    assert sorted(rows) == list(range(sum(lengths)))
    assert seed is not None or rows == sorted(rows)
    assert sizes[:-1] == [file_rows] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= file_rows


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), SEEDS)
def test_a_bucket_is_as_large_as_asked_for_or_one_file(
    lengths, file_rows, bucket_rows, seed
):
    plan = ShufflePlan(lengths, file_rows, bucket_rows, seed)

    sizes = [
        sum(stop - start for _, start, stop in plan.spans(bucket))
        for bucket in range(plan.buckets)
    ]

    assert max(sizes) <= max(bucket_rows, file_rows)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), st.randoms())
def test_the_order_in_which_buckets_are_read_does_not_matter(
    lengths, file_rows, bucket_rows, random
):
    plan = ShufflePlan(lengths, file_rows, bucket_rows, 3)
    order = list(range(plan.buckets))
    random.shuffle(order)

    files = dealt(ShufflePlan(lengths, file_rows, bucket_rows, 3), lengths, order)

    assert files == dealt(plan, lengths)


@pytest.mark.parametrize("lengths", [[1000] * 10, [100] * 100, [10] * 1000, [1] * 9999])
def test_a_bucket_has_its_share_of_each_tenth_of_the_data(lengths):
    plan = ShufflePlan(lengths, file_rows=10, bucket_rows=1000, seed=0)

    files = dealt(plan, lengths)

    for bucket in range(plan.buckets):
        rows = np.concatenate([files[file] for file in plan.files_of(bucket)])
        tenths = np.bincount(rows * 10 // sum(lengths), minlength=10)
        # Of 1,000 independent rows, 100 +- 9.5 would be in each tenth.
        assert tenths.min() > 60
        assert tenths.max() < 140


@pytest.mark.parametrize(
    "changed",
    [([3, 4], 2, 4, 0), ([4, 3], 1, 4, 0), ([4, 3], 2, 2, 0), ([4, 3], 2, 4, None)],
    ids=["lengths", "file_rows", "buckets", "seed"],
)
def test_the_checksum_tells_plans_apart(changed):
    arguments = ([4, 3], 2, 4, 0)

    assert ShufflePlan(*changed).checksum != ShufflePlan(*arguments).checksum
    assert ShufflePlan(*arguments).checksum == ShufflePlan(*arguments).checksum


def test_a_plan_of_many_pieces_and_buckets_is_small():
    plan = ShufflePlan([3000] * 20_000, file_rows=1000, bucket_rows=20_000, seed=0)
    tracemalloc.start()

    spans = plan.spans(plan.buckets - 1)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (plan.buckets, len(spans)) == (3000, 20_000)
    assert peak < 30 * 2**20  # a matrix of both would take 480 MB
