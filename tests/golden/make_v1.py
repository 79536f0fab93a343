"""What the frames in ``v1/`` hold, and how they were made.

Run ``python tests/golden/make_v1.py`` for a frame that is new; it writes none
over an old one. Frames that exist are never made again: they are what later
releases must read.
"""

from pathlib import Path

import numpy as np

from daskdl.codec import (
    DenseUpdate,
    Kind,
    SparseUpdate,
    Stamp,
    encode,
    encode_dense,
    quantize,
)

FOLDER = Path(__file__).parent / "v1"
STAMP = Stamp(run=0x0123456789ABCDEF, origin=3, sequence=2**40, step=41)


def scattered(size, one_in):
    """About one position in so many, signed, by an integer hash of its own.

    Not a random generator: those may change what they draw from a seed.
    """
    mixed = np.arange(size, dtype=np.uint32)
    for shift, factor in [(15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)]:
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    positions = np.flatnonzero(mixed % np.uint32(one_in) == 0)
    signs = np.where(mixed[positions] // np.uint32(one_in) % 2, -1, 1)
    return ((positions + 1) * signs).astype(np.int32)


def sparse(kind, size, threshold, entries, levels=None):
    entries_K = np.asarray(entries, np.int32)
    return SparseUpdate(STAMP, kind, size, threshold, entries_K, levels)


def falling(count):
    """Levels 1 to 15, about half as many of each as of the one below."""
    numbers = np.abs(scattered(4 * count, 3))[:count] % 2**14
    highest = np.array([(int(n) & -int(n)).bit_length() or 15 for n in numbers])
    return np.minimum(highest, 15).astype(np.uint8)


class Dense8Update(DenseUpdate):
    """Counts that eight bits for each, and a scale for each block, hold exactly."""


# Three blocks: of scale 3, of scale 1,000, and as far as int32 reaches, cut short.
SPREAD = np.arange(256) * 37 % 255 - 127  # each of -127 .. 127, one of them twice
ENDS = np.array([0, 16_909_320 * 127, -16_909_320 * 127, 16_909_320])
EIGHT = np.concatenate([3 * SPREAD, -1_000 * SPREAD, ENDS]).astype(np.int32)


FAR = scattered(30_000, 300)
UNEVEN = np.concatenate([scattered(4_000, 5), FAR + 10_000 * np.sign(FAR)])
ROWS = np.concatenate([scattered(500, 2), 12_001 + np.arange(900)]).astype(np.int32)

HUNDREDTH = scattered(20_000, 100)

UPDATES = {
    "raw32": sparse(Kind.RAW32, 3, 0.5, [1, 2, -3]),
    "raw32_ends": sparse(Kind.RAW32, 2**31 - 1, 2.0**-24, [-1, 2**31 - 1]),
    "raw32_empty": sparse(Kind.RAW32, 7, 2.0**-10, []),
    "gaps_one": sparse(Kind.GAPS, 20_000, 2.0**-10, scattered(20_000, 100)),
    "gaps_blocks": sparse(Kind.GAPS, 40_000, 2.0**-10, UNEVEN),
    "gaps_lz4": sparse(Kind.GAPS, 40_000, 2.0**-10, ROWS),
    "levels": sparse(Kind.LEVELS, 20_000, 2.0**-10, HUNDREDTH, falling(len(HUNDREDTH))),
    "levels_ends": sparse(
        Kind.LEVELS, 2**31 - 1, 2.0**-24, [-1, 2**31 - 1], np.array([15, 1], np.uint8)
    ),
    "levels_lz4": sparse(
        Kind.LEVELS, 40_000, 2.0**-10, ROWS, np.full(len(ROWS), 2, np.uint8)
    ),
    "bitmap": sparse(Kind.BITMAP, 203, 2.0**-3, scattered(203, 3)),
    "bitmap_lz4": sparse(Kind.BITMAP, 20_001, 2.0**-3, scattered(5_000, 100)),
    "dense8": Dense8Update(STAMP, 516, 2.0**-24, EIGHT),
    # The block from 2,048 is all 0.
    "dense8_lz4": Dense8Update(
        STAMP, 4_000, 2.0**-24, (np.arange(4_000) // 600 - 3).astype(np.int32)
    ),
    "dense32": DenseUpdate(
        STAMP, 5, 2.0**-24, np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
    ),
    "dense32_lz4": DenseUpdate(
        STAMP, 4_000, 2.0**-24, (np.arange(4_000) // 100 - 20).astype(np.int32)
    ),
}


def frame_of(update):
    if isinstance(update, Dense8Update):
        quantized = quantize(update.counts_N)
        return encode_dense(update.stamp, update.grid, quantized)
    if isinstance(update, DenseUpdate):
        return encode_dense(update.stamp, update.grid, update.counts_N)
    return encode(*update[:1], *update[2:5], update.kind, update.levels_K)


def main():
    for name, update in UPDATES.items():
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(frame_of(update).tobytes())


if __name__ == "__main__":
    main()
