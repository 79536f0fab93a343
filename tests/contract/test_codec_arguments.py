"""What could not be read back is not written: one case per check of an argument."""

import re

import numpy as np
import pytest

from daskdl.codec import (
    Kind,
    Quantized,
    Stamp,
    encode,
    encode_dense,
)
from daskdl.errors import CodecError

STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
ENTRIES = np.array([1, -4, 10], np.int32)
DENSE = np.array([1, -1, 2**31 - 1, -(2**31)], np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stamp": STAMP._replace(run=2**64)}, "run must be in 0 .. 2**64 - 1"),
        ({"stamp": STAMP._replace(origin=2**32)}, "origin must be in 0 .. 2**32 - 1"),
        ({"stamp": STAMP._replace(sequence=-1)}, "2**64 - 1, got -1"),
        ({"size": 0}, "parameters must be in 1 .. 2**31 - 1, got 0"),
        ({"size": 2**31}, "parameters must be in 1 .. 2**31 - 1, got 2147483648"),
        ({"threshold": 0.0}, "threshold must be finite and > 0, got 0.0"),
        ({"threshold": float("inf")}, "threshold must be finite and > 0, got inf"),
        ({"threshold": 1e-3}, "exact in float32, got 0.001, the nearest is 0.00100000"),
        ({"threshold": 1e39}, "exact in float32, got 1e+39, the nearest is inf"),
        ({"size": 9}, "entries of 9 parameters must be in 1 .. 9 or negative, got 10"),
        (
            {"entries_K": ENTRIES[::-1]},
            "ascending in position, got 10 and then -4 at 1",
        ),
        ({"entries_K": np.array([0], np.int32)}, "or negative, got 0 at 0"),
        ({"entries_K": np.array([1, -(2**31)], np.int32)}, "got -2147483648 at 1"),
        ({"entries_K": ENTRIES.astype(np.int64)}, "int32, got int64 of shape (3,)"),
        ({"entries_K": ENTRIES[None]}, "int32, got int32 of shape (1, 3)"),
        ({"kind": Kind.DENSE32}, "got <Kind.DENSE32: 5>"),
    ],
    ids=str,
)
def test_invalid_arguments_are_not_encoded(changes, message):
    arguments = {"stamp": STAMP, "size": 10, "threshold": 0.5, "entries_K": ENTRIES}

    with pytest.raises(CodecError, match=re.escape(message)):
        encode(**(arguments | changes))


def eight(scales, values):
    return Quantized(np.array(scales, np.int32), np.array(values, np.int8))


@pytest.mark.parametrize(
    ("grid", "counts", "message"),
    [
        (0.1, DENSE, "threshold must be exact in float32, got 0.1"),
        (0.5, DENSE[:0], "parameters must be in 1 .. 2**31 - 1, got 0"),
        (0.5, DENSE.astype(np.int64), "got int64 of shape (4,)"),
        (0.5, DENSE[None], "got int32 of shape (1, 4)"),
        (0.1, eight([1], [1]), "threshold must be exact in float32, got 0.1"),
        (0.5, eight([], []), "parameters must be in 1 .. 2**31 - 1, got 0"),
        (0.5, eight([1, 1], [1]), "got (2,) scales for (1,)"),
        (0.5, eight([[1]], [1]), "got (1, 1) scales for (1,)"),
        (0.5, eight([1], [[1]]), "got (1,) scales for (1, 1)"),
        (0.5, eight([1], [-128]), "got -128 in block 0"),
        (0.5, eight([0], [1]), "block 0 must have the scale 0 if"),
        (0.5, eight([-1], [1]), "got 4294967295 of block 0"),
        (0.5, Quantized(DENSE[:1].astype(np.int64), DENSE.astype(np.int8)), "int64"),
        (0.5, Quantized(DENSE[:1], DENSE), "and values of int8, got int32 and int32"),
    ],
    ids=str,
)
def test_invalid_counts_are_not_encoded(grid, counts, message):
    with pytest.raises(CodecError, match=re.escape(message)):
        encode_dense(STAMP, grid, counts)
