"""From leased pieces to rows: which part is loaded when, and what of it is used."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from daskdl.channel.base import Piece
from daskdl.channel.leases import Range
from daskdl.data import trees
from daskdl.data.batches import Chunk, whole
from daskdl.data.labels import LabelCheck
from daskdl.data.rehearsal import MISFITS
from daskdl.data.trees import Rows
from daskdl.errors import LostPieceError, WaitTimeoutError
from daskdl.training.stores import Store

logger = logging.getLogger(__name__)


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
        skips: Whether a part that cannot be read is left out.
    """

    phase: str
    seed: tuple[int, ...] | None
    batch_size: int
    prefetch: int
    labels: LabelCheck | None
    skips: bool


class Reader:
    """Reads what is leased, in one epoch; holds the part that was read last.

    Args:
        store: Has the parts.
        reading: How they are read.

    Attributes:
        skipped: Rows of parts that could not be read.
    """

    skipped: int

    def __init__(self, store: Store, reading: Reading) -> None:
        self.skipped = 0
        self._store = store
        self._reading = reading
        self._held: tuple[int, Rows, np.ndarray | None] | None = None
        self._bad: set[int] = set()

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        """Yield the rows of a piece in the order in which they are trained on."""
        for i, one in enumerate(piece.ranges):
            self._look_ahead(piece, i)
            if one.stop < 0:
                yield from self._stream(one.part)
                continue
            chunk = self._read(one, piece.keys)
            if chunk is not None:
                yield chunk
            del chunk  # or the part would stay while the next is waited for

    def _look_ahead(self, piece: Piece, now: int) -> None:
        """Begin to load what comes next, and nothing that does not."""
        wanted = [piece.ranges[now].part]
        rows = 0
        for later in piece.ranges[now + 1 :]:
            enough = rows >= self._reading.prefetch * self._reading.batch_size
            if self._reading.prefetch == 0 or (enough and len(wanted) > 1):
                break
            rows += later.stop - later.start
            wanted.append(later.part)
        if self._reading.prefetch and len(set(wanted)) == 1 and piece.ahead is not None:
            wanted.append(piece.ahead)
        phase = self._reading.phase
        self._store.forget(phase, wanted)
        for part in wanted:
            new = self._held is None or part != self._held[0]
            if new and part not in self._bad and not self._is_stream(piece, part):
                self._store.begin(phase, part, piece.keys[part])

    def _is_stream(self, piece: Piece, part: int) -> bool:
        return any(one.part == part and one.stop < 0 for one in piece.ranges)

    def _read(self, one: Range, keys: Mapping[int, str]) -> Chunk | None:
        if self._held is None or self._held[0] != one.part:
            self._held = None  # not two in memory that are done with
            if one.part not in self._bad:
                self._hold(one.part, keys[one.part])
        if self._held is None:
            self.skipped += one.stop - one.start
            return None
        _, rows, order = self._held
        within = slice(one.start, one.stop)
        return Chunk(rows, within if order is None else order[within])

    def _hold(self, part: int, key: str) -> None:
        phase = self._reading.phase
        try:
            rows = self._store.rows(phase, part, key)
            self._check(rows, part)
        except (WaitTimeoutError, LostPieceError):
            raise
        except (*MISFITS, OSError) as error:
            if not self._reading.skips:
                error.add_note(f"in part {part} of the {phase} data")
                raise
            logger.warning("part %s of the %s data is left out: %s", part, phase, error)
            self._bad.add(part)
            return
        order = None
        if self._reading.seed is not None:
            # The same rows in the same order, whoever trains on the part.
            rng = np.random.default_rng([*self._reading.seed, part])
            order = rng.permutation(trees.length(rows[0]))
        self._held = part, rows, order

    def _check(self, rows: Rows, part: int) -> None:
        if self._reading.labels is not None:
            of = f"part {part} of the {self._reading.phase} data"
            self._reading.labels.check(rows[1], of)

    def _stream(self, part: int) -> Iterator[Chunk]:
        reading = self._reading
        size = reading.batch_size
        for rows in self._store.stream(reading.phase, part, size, reading.prefetch):
            self._check(rows, part)
            yield whole(rows)
