"""A small module, a compressor, an update, and frames damaged on purpose."""

import struct
import zlib

import numpy as np
import torch
from torch import nn

from daskdl.codec import Kind, SparseUpdate, Stamp
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import ReplicaVector
from daskdl.compression.residuals import KeepResidual
from daskdl.compression.thresholds import FixedThreshold

GRID = 2.0**-24
STAMP = Stamp(run=1, origin=2, sequence=3, step=4)


class Vector(nn.Module):
    """Parameters of the values given, in two groups if asked."""

    def __init__(self, values, dtype=torch.float32, second=()):
        super().__init__()
        self.first = nn.Parameter(torch.tensor(values, dtype=dtype))
        if second:
            self.second = nn.Parameter(torch.tensor(second, dtype=torch.float64))

    def step(self, *values):
        with torch.no_grad():
            self.first += torch.tensor(values, dtype=self.first.dtype)


def make(module, threshold=None, residual=None, **options):
    return Compressor(
        FlatParameters(module),
        threshold or FixedThreshold(2.0**-4),
        residual or KeepResidual(),
        **options,
    )


def whole(module, strict=False):
    """The vectors that a compressor has, without it."""
    return ReplicaVector(FlatParameters(module), strict)


def proposed(compressor):
    """What a compressor with one algorithm would send."""
    [update] = compressor.propose()
    return update


def sparse(size, entries, threshold=2.0**-4):
    entries_K = np.array(entries, np.int32)
    return SparseUpdate(STAMP, Kind.RAW32, size, threshold, entries_K)


def repaired(frame):
    """The frame with the checksum its other bytes ask for."""
    opening = bytes(frame[:60]) + bytes(4)
    total = zlib.crc32(opening + bytes(frame[64:]))
    return bytes(frame[:60]) + struct.pack("<I", total) + bytes(frame[64:])


def patched(frame, offset, layout, *values):
    """The frame with other values at an offset, and a checksum that fits."""
    changed = bytearray(frame)
    struct.pack_into("<" + layout, changed, offset, *values)
    return repaired(changed)


def rebodied(frame, body, compressed=None):
    """The frame with another body, or an lz4 payload said to make its length."""
    header = bytearray(frame[:64])
    header[6] = compressed is not None
    struct.pack_into("<Q", header, 48, len(body))
    return repaired(bytes(header) + (body if compressed is None else compressed))
