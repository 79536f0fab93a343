"""Golomb-Rice codes: the same bits as a plain rendering, and the fewest."""

import numpy as np
import pytest

from daskdl.codec import golomb, reading
from daskdl.codec.reading import SparseBody
from daskdl.errors import CodecError

SIZE = 40_000


def gaps_of(positions, start=0):
    return np.diff(np.asarray(positions, np.int64), prepend=start - 1) - 1


def number(value, width):
    return "".join(str(value >> i & 1) for i in range(width))


def codes(values, rice):
    return "".join("0" * (g >> rice) + "1" + number(g, rice) for g in values.tolist())


def fewest(values):
    """The number of bits with the best Rice parameter: all of them tried."""
    return min(len(values) * (1 + r) + int((values >> r).sum()) for r in range(31))


def plain_blocks(positions, rices):
    """The text of bits as the page on the wire format has it."""
    text = ""
    for start, rice in zip(range(0, SIZE, 4096), rices, strict=True):
        block = positions[(positions >= start) & (positions < start + 4096)]
        if len(block):
            text += "1" + number(len(block) - 1, 12) + number(int(rice), 4)
            text += codes(gaps_of(block, start), int(rice))
        else:
            text += "0"
    return text


def packed(text):
    bits = np.array([int(bit) for bit in text], np.uint8)
    return np.packbits(bits, bitorder="little").tobytes()


def random_positions(size, density, seed=0):
    return np.flatnonzero(np.random.default_rng(seed).random(size) < density)


def signed(positions):
    """Entries at these positions, negative and positive in turn."""
    entries = (positions + 1).astype(np.int32)
    entries[::2] *= -1
    return entries


def rows(seed=0):
    """Some stretches full, some half, most silent."""
    generator = np.random.default_rng(seed)
    density = np.repeat(generator.choice([0, 0, 0, 0.02, 0.5, 1], SIZE // 500), 500)
    return np.flatnonzero(generator.random(SIZE) < density)


POSITIONS = {
    "first": np.array([0]),
    "last": np.array([SIZE - 1]),
    "all": np.arange(SIZE),
    "one per block": np.arange(0, SIZE, 4096),
    "block ends": np.arange(4095, SIZE, 4096),
    "long runs of zeros": np.array([*range(3_000), 9_000, 9_001, 30_000]),
    **{f"random {p}": random_positions(SIZE, p) for p in (1e-3, 0.03, 0.4, 0.95)},
    **{f"rows {seed}": rows(seed) for seed in range(3)},
}


def as_documented(plan, positions):
    """The body of a plan, written by the page on the wire format."""
    if plan.block == golomb.BLOCK:
        return b"\xff" + packed(plain_blocks(positions, plan.rices_B))
    rice = int(plan.rices_B[0])
    text = codes(gaps_of(positions), rice)
    assert len(text) == fewest(gaps_of(positions))
    return bytes([rice]) + packed(text)


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_the_shorter_of_both_ways_is_written_as_documented_and_read(positions):
    entries = signed(positions)
    plans = [golomb.plan_with(b, SIZE, entries) for b in (golomb.WHOLE, golomb.BLOCK)]

    bodies = [golomb.pack(plan) for plan in plans]

    for plan, body in zip(plans, bodies, strict=True):
        assert body.tobytes() == as_documented(plan, positions)
        assert len(body) == plan.length
        read = read_alone(body, SIZE, len(positions))
        np.testing.assert_array_equal(read, positions + 1)
    assert golomb.plan(SIZE, entries).length == min(map(len, bodies))


@pytest.mark.parametrize("parts", [2, 3, 40])
@pytest.mark.parametrize("block", [golomb.WHOLE, golomb.BLOCK])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_parts_are_joined_to_the_same_bytes(positions, block, parts):
    plan = golomb.plan_with(block, SIZE, signed(positions))

    body = golomb.pack(plan, np.array([7, 9], np.uint8), parts=parts)

    assert body.tobytes() == golomb.pack(plan).tobytes() + bytes([7, 9])


def test_blocks_of_4097_parameters_literally():
    entries = np.array([1, -4097], np.int32)
    plan = golomb.plan_with(golomb.BLOCK, 4097, entries)

    body = golomb.pack(plan)

    # Twice: 1, twelve 0 (count - 1), four 0 (Rice), 1.
    assert body.tobytes().hex(" ") == "ff 01 00 06 00 08"


def read_alone(body, size, count):
    """The entries of codes, all positive."""
    signs = np.zeros((count + 7) // 8, np.uint8)
    octets = np.concatenate([body, signs])
    [result] = reading.read([SparseBody(reading.CODES, size, count, 0, octets)])
    if isinstance(result, CodecError):
        raise result
    return result.entries_K


@pytest.fixture
def checked(monkeypatch):
    """The readers as plain Python, in which every index is checked."""
    for name, function in vars(reading).items():
        if hasattr(function, "py_func") and function.__module__ == reading.__name__:
            monkeypatch.setattr(reading, name, function.py_func)


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("mode", [0, 7, golomb.MAX_RICE, golomb.PER_BLOCK])
@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF])
@pytest.mark.usefixtures("checked")
def test_codes_are_not_read_beyond_their_words(length, mode, fill):
    stream = bytes(length - 1) + bytes([fill])
    body = np.frombuffer(bytes([mode]) + stream, np.uint8)

    with pytest.raises(CodecError):
        read_alone(body, 2**20, 9)
