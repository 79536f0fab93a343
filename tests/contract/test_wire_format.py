"""``docs/wire-format.md`` says what the code does: its examples and its tables."""

import re
from pathlib import Path

import numpy as np

from daskdl.codec import (
    Kind,
    SparseUpdate,
    Stamp,
    decode,
    decode_sum,
    encode,
    encode_dense,
    encode_sum,
    quantize,
)
from daskdl.codec.frame import LAYOUT, MAGIC, VERSION

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
EXAMPLES = [
    (Kind.RAW32, 3, [1, 2, -3], None),
    (Kind.GAPS, 10, [1, -4, 10], None),
    (Kind.LEVELS, 10, [1, -4, 10], [1, 3, 1]),
]


def examples():
    """The bytes of each hex block, comments apart."""
    for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL):
        yield bytes.fromhex(re.sub(r"#.*", "", block))


def summed():
    """The updates of the example of a sum."""
    entries = np.array([1, 2, -3], np.int32)
    other = STAMP._replace(origin=5)
    return [
        SparseUpdate(STAMP, Kind.RAW32, 3, 0.5, entries),
        SparseUpdate(other, Kind.RAW32, 3, 0.75, entries[:1]),
    ]


def test_the_worked_examples_are_encoded_as_documented():
    written = [
        encode(
            STAMP,
            size,
            0.5,
            np.array(entries, np.int32),
            kind,
            levels and np.array(levels, np.uint8),
        ).tobytes()
        for kind, size, entries, levels in EXAMPLES
    ]
    eight = quantize(np.array([381, -381, 1, 127], np.int32))
    written.append(encode_dense(STAMP, 2.0**-24, eight).tobytes())
    written.append(encode_sum(STAMP.run, summed()).tobytes())

    assert [frame.hex(" ") for frame in examples()] == [f.hex(" ") for f in written]


def test_the_worked_examples_are_decoded():
    *frames, of_sum = examples()
    *read, dense = map(decode, frames)
    total, counts_N = decode_sum(of_sum), np.zeros(3, np.int32)
    total.add_(counts_N, 1)

    for update, (*expected, levels) in zip(read, EXAMPLES, strict=True):
        assert [update.kind, update.size, update.entries_K.tolist()] == expected
        np.testing.assert_array_equal(update.levels_K, levels)
    assert {update.stamp for update in read} == {STAMP}
    assert (dense.stamp, dense.counts_N.tolist()) == (STAMP, [381, -381, 0, 126])
    assert (total.threshold, counts_N.tolist()) == (0.25, [5, 2, -2])
    assert total.summands == ((2, 3, 4), (5, 3, 4))


def test_the_header_table_has_every_byte_once():
    table = PAGE.split("## Header")[1].split("## Payload")[0]
    rows = [(int(a), int(b)) for a, b in re.findall(r"\| (\d+) \| (\d+) \|", table)]

    ends = [0, *(offset + size for offset, size in rows)]

    assert [offset for offset, _ in rows] == ends[:-1]
    assert ends[-1] == LAYOUT.size
    assert f"`{MAGIC.decode()}`" in table
    assert f"version {VERSION}" in PAGE.splitlines()[0]


def test_every_kind_is_in_the_table():
    table = PAGE.split("## Payload")[1].split("### GAPS")[0]
    rows = re.findall(r"^\| (\d) \| (\w+) \|", table, re.MULTILINE)

    documented = {int(number): name for number, name in rows}

    assert documented == {kind.value: kind.name for kind in Kind}
