"""100,000 damaged frames: CodecError or a sound update, and nothing else."""

import numpy as np
import pytest

from daskdl.codec import (
    DenseUpdate,
    Kind,
    Stamp,
    decode,
    encode,
    encode_dense,
    quantize,
)
from daskdl.errors import CodecError
from tests.golden.make_v1 import UPDATES, frame_of
from tests.support.updates import repaired

STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
COUNT = 25_000


def sound_frames():
    """Small frames of every kind, each way of GAPS, with lz4 and without."""
    for name, update in UPDATES.items():
        # 700 and 500 bytes: most flips would be in their codes and values.
        if name not in ("gaps_blocks", "dense8"):
            yield frame_of(update).tobytes()
    generator = np.random.default_rng(0)
    for size, density in [(1, 1), (50, 0.2), (300, 0.02), (9_000, 0.002)]:
        positions = np.flatnonzero(generator.random(size) < density)
        entries = ((positions + 1) * generator.choice([-1, 1], len(positions))).astype(
            np.int32
        )
        for kind in (Kind.RAW32, Kind.GAPS, Kind.BITMAP):
            yield encode(STAMP, size, 0.5, entries, kind).tobytes()
    clustered = np.array([*range(1, 61), *range(8_200, 8_230)], np.int32)
    yield encode(STAMP, 20_000, 0.5, clustered, Kind.GAPS).tobytes()
    yield encode_dense(STAMP, 0.5, np.arange(20, dtype=np.int32)).tobytes()
    few = quantize(np.array([300, -7, 0, 20, 0, 0], np.int32))
    yield encode_dense(STAMP, 0.5, few).tobytes()


FRAMES = list(sound_frames())


def flipped(frame, generator):
    """One to eight bits changed; half the time all of them in the payload."""
    changed = bytearray(frame)
    first = 64 if len(frame) > 64 and generator.random() < 0.5 else 0
    for _ in range(generator.integers(1, 9)):
        at = generator.integers(first, len(frame))
        changed[at] ^= 1 << int(generator.integers(8))
    return bytes(changed)


def of_noise(frame, generator):
    """Noise, half the time behind a sound beginning."""
    noise = generator.bytes(int(generator.integers(0, 200)))
    return frame[: int(generator.integers(0, 65))] + noise


def cut_or_grown(frame, generator):
    cut = frame[: int(generator.integers(0, len(frame) + 1))]
    return cut if generator.random() < 0.5 else frame + cut[:9] + b"\0"


def flipped_and_repaired(frame, generator):
    """A checksum that fits, and magic and version: the inner checks are asked."""
    return repaired(frame[:5] + flipped(frame, generator)[5:])


def check_sound(update):
    """Nothing that is applied from this update lands outside its vector."""
    if isinstance(update, DenseUpdate):
        assert update.counts_N.shape == (update.size,)
        assert update.counts_N.dtype == np.int32
        return
    if update.levels_K is not None:
        assert update.levels_K.shape == update.entries_K.shape
        assert update.levels_K.size == 0 or update.levels_K.min() >= 1
        assert update.levels_K.size == 0 or update.levels_K.max() <= 15
    positions = np.abs(update.entries_K.astype(np.int64)) - 1
    assert update.entries_K.dtype == np.int32
    assert (np.diff(positions) > 0).all()
    assert len(positions) == 0 or (positions[0] >= 0 and positions[-1] < update.size)


@pytest.mark.parametrize(
    ("damage", "fewest_decoded"),
    [(of_noise, 0), (cut_or_grown, 0), (flipped, 0), (flipped_and_repaired, 2_000)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_refused_or_harmless(damage, fewest_decoded):
    generator = np.random.default_rng(0)
    decoded = refused = 0

    for i in range(COUNT):
        frame = np.frombuffer(damage(FRAMES[i % len(FRAMES)], generator), np.uint8)
        before = frame.tobytes()
        try:
            check_sound(decode(frame))
            decoded += 1
        except CodecError:
            refused += 1
        assert frame.tobytes() == before

    # Both must happen: else the damage is none, or never gets to the inside.
    assert refused > COUNT / 4
    assert decoded >= fewest_decoded


@pytest.mark.parametrize("frame", FRAMES, ids=range(len(FRAMES)))
def test_no_single_flipped_bit_goes_unnoticed(frame):
    for bit in range(8 * min(len(frame), 300)):
        changed = bytearray(frame)
        changed[bit >> 3] ^= 1 << (bit & 7)

        with pytest.raises(CodecError):
            decode(changed)
