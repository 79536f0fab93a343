"""Bytes of one update in every kind, and the time to pack and read it.

Question: how near is each kind to what the positions and signs must cost?
Counted:  bytes of the body (header apart where a column says so), and the
          median of encode plus decode of the smallest kind. Not finding the
          entries, not sending.
Baseline: RAW32, and a byte-wise varint of the gaps for comparison.
Run:      python -m benchmarks wire-size

``bound`` is N * H(K / N) + K bits: the entropy of independent positions and
one bit per sign. Clustered positions may go below it.
"""

import argparse
import math
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.report import bars
from benchmarks.results import Question
from daskdl.codec import Kind, Stamp, decode, encode, golomb, payload_sizes

STAMP = Stamp(run=1, origin=0, sequence=1, step=1)
THRESHOLD = 2.0**-10
HEADER_BYTES = 64


@dataclass(frozen=True)
class Row:
    case: str
    size: int  # N
    entries: int  # K
    bound: float  # bytes
    raw32: int  # bytes, the baseline
    varint: int
    bitmap: int
    bitmap_lz4: int
    one: int  # GAPS with one Rice parameter
    blocks: int  # GAPS with one for each block
    gaps_lz4: int  # the smaller of those two, under lz4
    frame: int  # what encode makes by itself, header included
    kind: str  # what encode chose, + where it kept lz4
    ms: float  # encode + decode, median

    @property
    def over_bound(self) -> float:
        """GAPS body / bound."""
        return min(self.one, self.blocks) / self.bound

    @property
    def frame_over_bound(self) -> float:
        """Frame with its header / bound."""
        return self.frame / self.bound


def bound_bytes(size: int, count: int) -> float:
    p = count / size
    entropy = -sum(q * math.log2(q) for q in (p, 1 - p) if q)
    return (size * entropy + count) / 8


def varint_bytes(positions_K) -> int:
    """7 bits per byte, gaps and one bit of sign in the same number."""
    values = np.diff(positions_K, prepend=-1) * 2
    return int(sum((values >= 2**shift).sum() for shift in (7, 14, 21, 28)))


def median_ms(work, repeat: int) -> float:
    """Median of single runs, the first left out: it may compile."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def measure(case: str, size: int, positions, repeat: int) -> Row:
    signs = np.random.default_rng(1).choice([-1, 1], len(positions))
    entries = ((positions + 1) * signs).astype(np.int32)
    positions_K = positions.astype(np.int32)
    sizes = payload_sizes(size, entries)
    sign_bytes = (len(entries) + 7) // 8
    one, blocks = (
        golomb.plan_with(b, size, positions_K).length + sign_bytes
        for b in (golomb.WHOLE, golomb.BLOCK)
    )
    gaps_lz4, bitmap_lz4 = (
        len(encode(STAMP, size, THRESHOLD, entries, kind)) - HEADER_BYTES
        for kind in (Kind.GAPS, Kind.BITMAP)
    )
    frame = encode(STAMP, size, THRESHOLD, entries)

    def there_and_back():
        return decode(encode(STAMP, size, THRESHOLD, entries))

    update = there_and_back()
    assert np.array_equal(update.entries_K, entries)
    return Row(
        case=case,
        size=size,
        entries=len(entries),
        bound=bound_bytes(size, len(entries)),
        raw32=sizes[Kind.RAW32],
        varint=len(entries) + varint_bytes(positions_K),
        bitmap=sizes[Kind.BITMAP],
        bitmap_lz4=bitmap_lz4,
        one=one,
        blocks=blocks,
        gaps_lz4=gaps_lz4,
        frame=len(frame),
        kind=update.kind.name + "+" * bool(frame[6]),
        ms=median_ms(there_and_back, repeat),
    )


def cases(generator):
    """Yield (name, N, positions): independent ones, then clustered ones."""
    for count in (10_000, 58_000):
        for density in (1e-4, 1e-3, 1e-2, 1e-1, 0.5):
            size = round(count / density)
            chosen = generator.choice(size, count, replace=False, shuffle=False)
            yield f"random {density:.0e}", size, np.sort(chosen)
    rows, width = 2_800, 2_048
    active = generator.permutation(rows) < rows // 50
    for density in (1.0, 0.5, 0.1):
        present = (generator.random((rows, width)) < density) & active[:, None]
        name = f"2 % of 2,048-wide rows, {density:.0%} full"
        yield name, rows * width, np.flatnonzero(present)
    # Rows whose updates differ in scale by a factor e**2, as early layers do.
    scales = np.exp(2 * generator.standard_normal((rows, 1), dtype=np.float32))
    values = np.abs(generator.standard_normal((rows, width), dtype=np.float32)) * scales
    for density in (1e-3, 1e-2, 1e-1):
        largest = values >= np.quantile(values, 1 - density)
        name = f"largest {density:.0e} of unequal rows"
        yield name, rows * width, np.flatnonzero(largest)


def rows(asked):
    for name, size, positions in cases(np.random.default_rng(0)):
        row = measure(name, size, positions, asked.repeat)
        ratios = {
            name: getattr(row, name) for name in ("over_bound", "frame_over_bound")
        }
        yield asdict(row) | ratios


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=51, help="timed runs per row")


COUNTS = ("raw32", "varint", "bitmap", "bitmap_lz4", "one", "blocks", "gaps_lz4")

QUESTION = Question(
    "wire-size",
    __doc__,
    options,
    rows,
    {"case": "", "entries": ",", "bound": ",.0f"}
    | dict.fromkeys(COUNTS, ",")
    | {"over_bound": ".4f", "frame": ",", "frame_over_bound": ".4f"}
    | {"kind": "", "ms": ".2f"},
    lambda result: bars(result, "frame_over_bound", "case", "entries"),
)
