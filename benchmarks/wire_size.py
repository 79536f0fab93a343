"""Bytes of one update in every kind of frame, and the time to pack and read it.

Question: How close does each kind of frame come to the bytes that positions, signs and
          levels need at least?
Counted:  Bytes of the body (with the header where a column says "frame"), and the
          median of encode plus decode of the kind that is chosen. Finding the entries
          and sending are not included.
Baseline: RAW32, and a bytewise varint of the gaps for comparison.
Run:      python -m benchmarks wire-size

``bound`` is N * H(K / N) + K bits: the entropy of independent positions and one bit per
sign. Clustered positions may need less. Where entries have levels, the entropy of these
is added; ``levels`` are their bytes, and the columns before it are without them.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.report import bars
from benchmarks.results import Question
from daskdl.codec import Kind, Stamp, decode, encode, golomb, pack, payload_sizes

STAMP = Stamp(run=1, origin=0, sequence=1, step=1)
THRESHOLD = 2.0**-10
HEADER_BYTES = 64


def bound_bytes(size: int, count: int) -> float:
    p = count / size
    entropy = -sum(q * math.log2(q) for q in (p, 1 - p) if q)
    return (size * entropy + count) / 8


def entropy_bytes(levels_K: np.ndarray) -> float:
    """Entropy of independent levels."""
    counts = np.bincount(levels_K)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / len(levels_K))).sum()) / 8


def varint_bytes(positions_K: np.ndarray) -> int:
    """7 bits per byte; a gap and its sign are one number."""
    values = np.diff(positions_K, prepend=-1) * 2
    return len(values) + int(sum((values >= 2**s).sum() for s in (7, 14, 21, 28)))


def measured(
    size: int, positions: np.ndarray, levels_K: np.ndarray | None, repeat: int
) -> dict[str, Any]:
    count = len(positions)
    signs = np.random.default_rng(1).choice([-1, 1], count)
    entries = ((positions + 1) * signs).astype(np.int32)
    sizes = payload_sizes(size, entries)
    whole, blocks = (
        golomb.plan_with(b, size, entries).length + (count + 7) // 8
        for b in (golomb.WHOLE, golomb.BLOCK)
    )
    gaps_lz4, bitmap_lz4 = (
        len(encode(STAMP, size, THRESHOLD, entries, kind)) - HEADER_BYTES
        for kind in (Kind.GAPS, Kind.BITMAP)
    )
    bound, body, leveled = bound_bytes(size, count), min(whole, blocks), None
    if levels_K is not None:
        lengths = {
            kind: pack(size, entries, levels_K, kind).length
            for kind in (Kind.GAPS, Kind.LEVELS)
        }
        leveled = lengths[Kind.LEVELS] - lengths[Kind.GAPS]
        bound, body = bound + entropy_bytes(levels_K), body + leveled

    def encoded() -> np.ndarray:
        return encode(STAMP, size, THRESHOLD, entries, levels_K=levels_K)

    frame, times = encoded(), []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        update = decode(encoded())
        times.append(time.perf_counter() - began)
    assert np.array_equal(update.entries_K, entries)
    return {
        "bound": bound,
        "raw32": sizes[Kind.RAW32],
        "varint": varint_bytes(positions),
        "bitmap": sizes[Kind.BITMAP],
        "bitmap_lz4": bitmap_lz4,
        "one": whole,  # GAPS with one Rice parameter
        "blocks": blocks,  # GAPS with one per block
        "gaps_lz4": gaps_lz4,  # the smaller of the two, with lz4
        "levels": leveled,
        "over_bound": body / bound,
        "frame": len(frame),
        "frame_over_bound": len(frame) / bound,
        "kind": update.kind.name + "+" * bool(frame[6]),  # +: with lz4
        "ms": 1e3 * statistics.median(times[1:]),  # the first may compile
    }


def cases(
    generator: np.random.Generator,
) -> Iterator[tuple[str, int, np.ndarray, np.ndarray | None]]:
    """Name, N, positions and levels: independent, clustered, then with levels."""
    for count in (10_000, 58_000):
        for density in (1e-4, 1e-3, 1e-2, 1e-1, 0.5):
            size = round(count / density)
            chosen = generator.choice(size, count, replace=False, shuffle=False)
            yield f"random {density:.0e}", size, np.sort(chosen), None
    rows, width = 2_800, 2_048
    active = generator.permutation(rows) < rows // 50
    for density in (1.0, 0.5, 0.1):
        present = (generator.random((rows, width)) < density) & active[:, None]
        name = f"2 % of 2,048-wide rows, {density:.0%} full"
        yield name, rows * width, np.flatnonzero(present), None
    # Rows whose updates differ in scale by a factor e**2, as in early layers.
    scales = np.exp(2 * generator.standard_normal((rows, 1), dtype=np.float32))
    values = np.abs(generator.standard_normal((rows, width), dtype=np.float32)) * scales
    for density in (1e-3, 1e-2, 1e-1):
        largest = values >= np.quantile(values, 1 - density)
        name = f"largest {density:.0e} of unequal rows"
        yield name, rows * width, np.flatnonzero(largest), None
    # Most entries of one quantum; then of several, as after steps without exchange.
    for rarity in (0.9, 0.3):
        count, size = 58_000, 5_800_000
        chosen = generator.choice(size, count, replace=False, shuffle=False)
        levels = np.minimum(generator.geometric(rarity, count), 15).astype(np.uint8)
        name = f"random 1e-02, {levels.mean():.1f} quanta per entry"
        yield name, size, np.sort(chosen), levels


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, size, positions, levels in cases(np.random.default_rng(0)):
        case = {"case": name, "size": size, "entries": len(positions)}
        yield case | measured(size, positions, levels, asked.repeat)


QUESTION = Question(
    "wire-size",
    __doc__,
    rows,
    "case entries:, bound:,.0f raw32:, varint:, bitmap:, bitmap_lz4:, one:, blocks:, "
    "gaps_lz4:, levels:, over_bound:.4f frame:, frame_over_bound:.4f kind ms:.2f",
    {"--repeat": {"type": int, "default": 51, "help": "timed runs per row"}},
    lambda result: bars(result, "frame_over_bound", "case", "entries"),
)
