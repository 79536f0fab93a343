"""Each row goes into one batch file, whoever deals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.data.export import Deal, row_order

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum)
SEEDS = st.none() | st.integers(0, 9)


def dealt(deal, lengths, seed, buckets=None):
    """The rows of each file, numbered in the order of the parts, by file."""
    firsts = np.cumsum([0, *lengths])
    stored = [
        firsts[p] + row_order(length, seed, p, 0) for p, length in enumerate(lengths)
    ]
    files = {}
    for bucket in buckets or range(deal.buckets):
        rows = [stored[p][start:stop] for p, start, stop in deal.stretches(bucket)]
        for file, indices in deal.cuts(bucket):
            files[file] = np.concatenate(rows)[indices].tolist()
    return files


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), SEEDS)
def test_each_row_is_in_one_file(lengths, file_rows, bucket_rows, seed):
    deal = Deal(lengths, file_rows, bucket_rows, seed)

    files = dealt(deal, lengths, seed)

    rows = [row for file in range(deal.files) for row in files[file]]
    assert sorted(rows) == list(range(sum(lengths)))
    assert len(files) == deal.files


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), SEEDS)
def test_every_file_but_the_last_is_full(lengths, file_rows, bucket_rows, seed):
    deal = Deal(lengths, file_rows, bucket_rows, seed)

    sizes = [len(rows) for _, rows in sorted(dealt(deal, lengths, seed).items())]

    assert sizes[:-1] == [file_rows] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= file_rows


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), SEEDS)
def test_a_bucket_is_as_large_as_asked_for_or_one_file(
    lengths, file_rows, bucket_rows, seed
):
    deal = Deal(lengths, file_rows, bucket_rows, seed)

    sizes = [
        sum(stop - start for _, start, stop in deal.stretches(bucket))
        for bucket in range(deal.buckets)
    ]

    assert max(sizes) <= max(bucket_rows, file_rows)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), st.randoms())
def test_the_order_in_which_buckets_are_dealt_does_not_matter(
    lengths, file_rows, bucket_rows, random
):
    deal = Deal(lengths, file_rows, bucket_rows, 3)
    order = list(range(deal.buckets))
    random.shuffle(order)

    files = dealt(Deal(lengths, file_rows, bucket_rows, 3), lengths, 3, order)

    assert files == dealt(deal, lengths, 3)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 30))
def test_without_shuffling_rows_keep_their_order(lengths, file_rows, bucket_rows):
    deal = Deal(lengths, file_rows, bucket_rows, None)

    files = dealt(deal, lengths, None)

    rows = [row for file in range(deal.files) for row in files[file]]
    assert rows == list(range(sum(lengths)))


@pytest.mark.parametrize("lengths", [[1000] * 10, [100] * 100, [10] * 1000, [1] * 9999])
def test_a_bucket_has_its_share_of_each_tenth_of_the_data(lengths):
    deal = Deal(lengths, file_rows=10, bucket_rows=1000, seed=0)

    files = dealt(deal, lengths, 0)

    for bucket in range(deal.buckets):
        rows = np.concatenate([files[file] for file in deal.files_of(bucket)])
        tenths = np.bincount(rows * 10 // sum(lengths), minlength=10)
        # Of 1,000 independent rows, 100 +- 9.5 would be in each tenth.
        assert tenths.min() > 60
        assert tenths.max() < 140


def test_two_seeds_give_other_files():
    first, second = (
        dealt(Deal([20, 30], 5, 10, seed), [20, 30], seed) for seed in (0, 1)
    )

    assert first != second


def test_the_rows_of_two_parts_are_not_in_the_same_order():
    orders = [row_order(50, 0, part, 0).tolist() for part in (0, 1)]

    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "other",
    [
        Deal([3, 4], 2, 4, 0),
        Deal([4, 3], 1, 4, 0),
        Deal([4, 3], 2, 2, 0),
        Deal([4, 3], 2, 4, None),
    ],
    ids=["lengths", "file_rows", "buckets", "seed"],
)
def test_the_checksum_tells_deals_apart(other):
    assert other.checksum != Deal([4, 3], 2, 4, 0).checksum
    assert Deal([4, 3], 2, 4, 0).checksum == Deal([4, 3], 2, 4, 0).checksum
