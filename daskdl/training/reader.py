"""From leased pieces to rows: which part is loaded when, and what of it is used."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from daskdl.channel.leasing import Piece, Range
from daskdl.data import trees
from daskdl.data.batches import Chunk, whole
from daskdl.data.faults import UNREADABLE, blames_data, is_left_out, joined_files
from daskdl.data.labels import LabelCheck
from daskdl.data.trees import Rows
from daskdl.errors import DataError
from daskdl.training.stores import Store


@dataclass(frozen=True)
class Reading:
    """How the parts of one phase are read in one epoch.

    Attributes:
        phase: ``"train"`` or ``"validation"``.
        seed: Of the order of the rows of each part; None keeps it.
        batch_size: Rows per batch.
        prefetch: Parts with rows of so many batches more are loaded meanwhile, and
            the next part in any case; 0: none.
        labels: What labels are held to; None: they are not looked at.
        skips: Whether a part that cannot be read is left out; of several files, those
            that cannot.
        fits: Raises `DataError` if the model cannot be run on the rows of a part, which
            gets a name for the message; None: that is not looked at.
        drop_last: Whether batches of fewer rows are left out.
    """

    phase: str
    seed: tuple[int, ...] | None
    batch_size: int
    prefetch: int
    labels: LabelCheck | None
    skips: bool
    fits: Callable[[Rows, str], None] | None = None
    drop_last: bool = False


class Reader:
    """Reads what is leased, in one epoch; holds the part that was read last.

    Args:
        store: Has the parts.
        reading: How they are read.

    Attributes:
        skipped: Rows that could not be read, or not be used.
        reason: Why the first of them, if any.
    """

    skipped: int
    reason: str

    def __init__(self, store: Store, reading: Reading) -> None:
        self.skipped = 0
        self.reason = ""
        self._store = store
        self._reading = reading
        self._held: tuple[int, Rows, np.ndarray | None] | None = None
        self._bad: set[int] = set()
        self._partial: set[int] = set()  # parts of which some files are left out

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        """Yield the rows of a piece in the order in which they are trained on."""
        for i, one in enumerate(piece.ranges):
            if one.is_whole:
                yield from self._stream(one.part)
                continue
            if self._held is not None and self._held[0] != one.part:
                self._held = None  # not two in memory that are done with
            self._look_ahead(piece, i)
            chunk = self._read(one, piece.keys)
            if chunk is not None:
                yield chunk
            del chunk  # or the part would stay while the next is waited for

    def _look_ahead(self, piece: Piece, now: int) -> None:
        """Begin to load what comes next, and nothing that does not."""
        wanted = self._wanted(piece, now)
        phase = self._reading.phase
        self._store.forget(phase, wanted)
        for part in wanted:
            new = self._held is None or part != self._held[0]
            if new and part not in self._bad:
                self._store.begin(phase, part, piece.keys[part])

    def _wanted(self, piece: Piece, now: int) -> Mapping[int, None]:
        """The part that is read now and those after it, in order."""
        wanted = {piece.ranges[now].part: None}
        if self._reading.prefetch == 0:
            return wanted
        rows, enough = 0, self._reading.prefetch * self._reading.batch_size
        at = now + 1  # no slice: a piece may have thousands of parts
        while at < len(piece.ranges) and (rows < enough or len(wanted) == 1):
            rows += piece.ranges[at].rows
            wanted[piece.ranges[at].part] = None
            at += 1
        if len(wanted) == 1 and piece.ahead is not None:
            wanted[piece.ahead] = None
        return wanted

    def _read(self, one: Range, keys: Mapping[int, str]) -> Chunk | None:
        if self._held is None and one.part not in self._bad:
            self._hold(one.part, keys[one.part])
        if self._held is None:
            self.skipped += one.stop - one.start
            return None
        _, rows, order = self._held
        count, stop = trees.length(rows[0]), one.stop
        if one.part in self._partial:
            stop = max(min(stop, count), one.start)
            self.skipped += one.stop - stop
        else:
            self._check_length(count, one)
        within = slice(one.start, stop)
        return Chunk(rows, within if order is None else order[within])

    def _hold(self, part: int, key: str) -> None:
        phase = self._reading.phase
        with self._left_out_if_bad(part):
            try:
                rows = self._store.rows(phase, part, key)
                self._check(rows, part)
            except UNREADABLE as error:
                left = self._left_of(part, key, error)
                if left is None:
                    raise
                rows = left
            self._held = part, rows, self._order(part, trees.length(rows[0]))

    def _left_of(self, part: int, key: str, error: BaseException) -> Rows | None:
        """What is left of a part without the files that are bad, if that may be.

        If it may not, the error of the first one comes out.
        """
        if not blames_data(error):
            return None
        skips = self._reading.skips
        files = self._store.separate(self._reading.phase, part, key, skips)
        if not skips:
            for name, one in files:
                self._check_rows(one, name)
            return None
        rows, _ = joined_files(iter(files), self._check_rows)
        if rows is not None:
            self.reason = self.reason or str(error)
            self._partial.add(part)
        return rows

    def _order(self, part: int, rows: int) -> np.ndarray | None:
        """The same for the same rows, whoever trains on the part."""
        if self._reading.seed is None:
            return None
        rng = np.random.default_rng([*self._reading.seed, part])
        return rng.permutation(rows)

    @contextlib.contextmanager
    def _left_out_if_bad(self, part: int) -> Iterator[None]:
        """Say of which part an error is; it ends here if such a part is left out."""
        try:
            yield
        except UNREADABLE as error:
            name = self._store.name(self._reading.phase, part)
            if not is_left_out(error, name, self._reading.skips):
                raise
            self.reason = self.reason or str(error)
            self._bad.add(part)

    def _check_length(self, rows: int, one: Range) -> None:
        if rows < one.stop:
            raise DataError(
                f"{self._store.name(self._reading.phase, one.part)} has {rows} rows "
                f"now, and had {one.stop} or more before; it must be the same each "
                "time it is loaded or computed: persist() it, or export it"
            )

    def _check(self, rows: Rows, part: int) -> None:
        self._check_rows(rows, self._store.name(self._reading.phase, part))

    def _check_rows(self, rows: Rows, of: str) -> None:
        if self._reading.labels is not None:
            self._reading.labels.check(rows[1], of)
        if self._reading.fits is not None:
            self._reading.fits(rows, of)

    def _stream(self, part: int) -> Iterator[Chunk]:
        reading = self._reading
        size, ahead = reading.batch_size, reading.prefetch
        with self._left_out_if_bad(part):
            for rows in self._store.stream(reading.phase, part, size, ahead):
                self._check(rows, part)
                yield whole(rows)
                del rows
