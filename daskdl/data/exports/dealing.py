"""Which rows of which piece go into which batch file; numbers only.

Rows lie in *pieces*, files of rows as they came; they are dealt into *buckets*, each as
many rows as one task can hold, and a bucket is cut into batch files. A bucket takes a
stretch of consecutive rows of each piece, so that it can be read without the others.
When shuffling, the rows of a piece are in random order before, the pieces are dealt
one after the other in random order, and row by row to one bucket after the other: each
bucket gets about the same share of every piece. Everything follows from the lengths
and the seed alone, not from who does the work.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Of a random generator's seed, behind the user's: which use of it this is.
_ORDER, _BUCKET, _PIECE = 0, 1, 2


class Stretch(NamedTuple):
    """Consecutive rows of one piece."""

    piece: int
    start: int
    stop: int


class Deal:
    """Where the rows of pieces go.

    Args:
        lengths: Rows of each piece, at least one row in all.
        file_rows: Rows of each batch file but the last, >= 1.
        bucket_rows: About as many may a bucket have; at least one file is in each.
        seed: Of the shuffling; None: rows keep their order.

    Attributes:
        rows: All together.
        files: How many batch files there will be.
        buckets: How many buckets.
    """

    rows: int
    files: int
    buckets: int

    def __init__(
        self,
        lengths: Sequence[int],
        file_rows: int,
        bucket_rows: int,
        seed: int | None,
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        self._file_rows, self._seed = file_rows, seed
        self.rows = int(self._lengths.sum())
        self.files = -(-self.rows // file_rows)
        self.buckets = -(-self.files // max(bucket_rows // file_rows, 1))
        self._order = np.arange(len(self._lengths))
        if seed is not None:
            self._order = np.random.default_rng((seed, _ORDER)).permutation(self._order)

    @property
    def checksum(self) -> int:
        """Tells this deal from others."""
        told = (self._lengths.tolist(), self._file_rows, self.buckets, self._seed)
        return zlib.crc32(repr(told).encode())

    def files_of(self, bucket: int) -> range:
        """The numbers of the batch files cut from a bucket.

        Buckets differ by one file at most; those with more come first.

        Example:
            >>> deal = Deal([10], file_rows=2, bucket_rows=4, seed=None)
            >>> [list(deal.files_of(bucket)) for bucket in range(deal.buckets)]
            [[0, 1], [2, 3], [4]]
        """
        few, more = divmod(self.files, self.buckets)
        first = bucket * few + min(bucket, more)
        return range(first, first + few + (bucket < more))

    def rows_of(self, files: range) -> int:
        """How many rows some consecutive files have together."""
        rows = self._file_rows
        return min(files.stop * rows, self.rows) - min(files.start * rows, self.rows)

    def stretches(self, bucket: int) -> list[Stretch]:
        """The rows of a bucket, as far as there are any, in the order of the pieces.

        Example:
            >>> Deal([3, 4], file_rows=2, bucket_rows=4, seed=None).stretches(0)
            [Stretch(piece=0, start=0, stop=3), Stretch(piece=1, start=0, stop=1)]
        """
        ends = np.cumsum(self._lengths[self._order])
        begins = ends - self._lengths[self._order]
        start, stop = (
            self._below(ends, edge) - self._below(begins, edge)
            for edge in (bucket, bucket + 1)
        )
        taken = np.flatnonzero(stop > start)
        columns = (self._order[taken], start[taken], stop[taken])
        found = (Stretch(*(int(n) for n in row)) for row in zip(*columns, strict=True))
        return sorted(found)

    def cuts(self, bucket: int) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each file of a bucket, and which of the bucket's rows it has.

        Yields:
            Pairs (file, indices); those of a bucket are each of its rows once.
        """
        files = self.files_of(bucket)
        order = np.arange(self.rows_of(files))
        if self._seed is not None:
            rng = np.random.default_rng((self._seed, _BUCKET, bucket))
            order = rng.permutation(order)
        for i, file in enumerate(files):
            yield file, order[i * self._file_rows : (i + 1) * self._file_rows]

    def _below(self, rows: np.ndarray, bucket: int) -> np.ndarray:
        """How many of the first so many rows are in the buckets before this one."""
        if self._seed is None:
            before = self.rows_of(range(self.files_of(bucket).start))
            capped: np.ndarray = np.minimum(rows, before)
            return capped
        below = np.zeros_like(rows)
        left = rows
        for rounds, buckets in self._rounds():
            dealt = np.minimum(left, rounds * buckets)
            full, more = np.divmod(dealt, buckets)
            first = min(bucket, buckets)
            below += full * first + np.minimum(more, first)
            left = left - dealt
        return below

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """Dealing goes round by round: one row to each of the first so many buckets.

        Yields:
            Pairs (rounds, buckets), in order: buckets with fewer rows drop out.
        """
        last = self.rows_of(self.files_of(self.buckets - 1))
        few, longer = divmod(self.files, self.buckets)
        phases = (
            (last, self.buckets),
            (few * self._file_rows - last, self.buckets - 1),
            (self._file_rows, longer),
        )
        yield from (phase for phase in phases if phase[1])


def row_order(rows: int, seed: int | None, part: int, block: int) -> np.ndarray:
    """The order in which rows are put into pieces.

    Args:
        rows: How many.
        seed: Of the shuffling; None: as they came.
        part: The part of the data they are from.
        block: Which block of that part they are, if it comes in several.

    Example:
        >>> row_order(3, None, part=0, block=0)
        array([0, 1, 2])
    """
    if seed is None:
        return np.arange(rows)
    return np.random.default_rng((seed, _PIECE, part, block)).permutation(rows)
