"""The assignment of rows to packed files: numbers only, no I/O."""

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Purposes of a random permutation; each has its own generator.
ORDER, BUCKET, PIECE = 0, 1, 2


def permutation(rows: int, seed: int | None, *purpose: int) -> np.ndarray:
    """Return a permutation that depends on the seed and its purpose.

    Without a seed, the rows keep their order.
    """
    if seed is None:
        return np.arange(rows)
    return np.random.default_rng((seed, *purpose)).permutation(rows)


class Span(NamedTuple):
    """Consecutive rows of one piece."""

    piece: int
    start: int
    stop: int


class ShufflePlan:
    """Assign rows of pieces to buckets, and rows of buckets to packed files.

    A bucket has a span of consecutive rows of each piece, so that it can be read
    without the rest of the piece. For shuffling, the rows of each piece are in random
    order, and the pieces are dealt in random order, row by row, to the buckets in turn:
    each bucket gets about the same share of every piece. The plan depends on the
    lengths and the seed alone.

    Args:
        lengths: Rows of each piece.
        file_rows: Rows of a packed file; the last may have fewer.
        bucket_rows: Maximum rows of a bucket with several files.
        seed: Seed of the shuffling; None: rows keep their order.
    """

    def __init__(
        self, lengths: Sequence[int], file_rows: int, bucket_rows: int, seed: int | None
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        self._file_rows, self._seed = file_rows, seed
        self.rows = int(self._lengths.sum())
        self.files = -(-self.rows // file_rows)
        self.buckets = -(-self.files // max(bucket_rows // file_rows, 1))
        self._order = permutation(len(self._lengths), seed, ORDER)
        numbers = (self._lengths.tolist(), file_rows, self.buckets, seed)
        self.checksum = zlib.crc32(repr(numbers).encode())

    def files_of(self, bucket: int) -> range:
        """Return the numbers of the packed files of a bucket.

        Buckets differ by at most one file; the larger ones come first.
        """
        size, larger = divmod(self.files, self.buckets)
        start = bucket * size + min(bucket, larger)
        return range(start, start + size + (bucket < larger))

    def spans(self, bucket: int) -> list[Span]:
        """Return the rows of a bucket, in the order of the pieces."""
        ends = np.cumsum(self._lengths[self._order])
        begins = ends - self._lengths[self._order]
        start, stop = (
            self._below(ends, edge) - self._below(begins, edge)
            for edge in (bucket, bucket + 1)
        )
        taken = np.flatnonzero(stop > start)
        spans = np.stack([self._order[taken], start[taken], stop[taken]], axis=1)
        return sorted(Span(*span) for span in spans.tolist())

    def cuts(self, bucket: int) -> Iterator[np.ndarray]:
        """Return the rows of each file of a bucket, as indices into the bucket."""
        files, size = self.files_of(bucket), self._file_rows
        order = permutation(self._rows_in(files), self._seed, BUCKET, bucket)
        return (order[i * size : (i + 1) * size] for i in range(len(files)))

    def _rows_in(self, files: range) -> int:
        rows = self._file_rows
        return min(files.stop * rows, self.rows) - min(files.start * rows, self.rows)

    def _below(self, rows: np.ndarray, bucket: int) -> np.ndarray:
        """Count how many of the first `rows` rows are in earlier buckets."""
        if self._seed is None:
            before = self._rows_in(range(self.files_of(bucket).start))
            capped: np.ndarray = np.minimum(rows, before)
            return capped
        below = np.zeros_like(rows)
        left = rows
        for rounds, buckets in self._rounds():
            dealt = np.minimum(left, rounds * buckets)
            full, begun = np.divmod(dealt, buckets)
            earlier = min(bucket, buckets)
            below += full * earlier + np.minimum(begun, earlier)
            left = left - dealt
        return below

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """Yield numbers of rounds, each of which deals a row to the first n buckets."""
        last = self._rows_in(self.files_of(self.buckets - 1))
        size, larger = divmod(self.files, self.buckets)
        yield last, self.buckets
        if self.buckets > 1:
            yield size * self._file_rows - last, self.buckets - 1
        if larger:
            yield self._file_rows, larger
