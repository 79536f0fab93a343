"""Updates as bytes and back: numpy in, numpy out; no torch, no Dask, no state.

:func:`pack` and :func:`framed` write entries as a frame of the kind that carries most
for its bytes, :func:`encode` in one call; :func:`decode` reads a frame and checks every
byte, the only check of updates from other processes, and :func:`decode_all` reads many.
Frames are in :mod:`daskdl.codec.frame`, Golomb-Rice coded gaps in
:mod:`daskdl.codec.golomb`, quanta per entry in :mod:`daskdl.codec.levels`, the reader
of both in :mod:`daskdl.codec.reading`, eight bits per parameter in
:mod:`daskdl.codec.dense8`, and sums of several updates in :mod:`daskdl.codec.sums`.
"""

from daskdl.codec.dense8 import Quantized, counts_of, quantize
from daskdl.codec.frame import (
    Body,
    DenseUpdate,
    Kind,
    SparseUpdate,
    Stamp,
    Update,
    decode,
    decode_all,
    encode,
    encode_dense,
    framed,
    pack,
    payload_sizes,
    read_kind,
)
from daskdl.codec.sums import (
    SumEncoder,
    Summand,
    SumUpdate,
    add_entries_,
    decode_sum,
    encode_sum,
)

__all__ = [
    "Body",
    "DenseUpdate",
    "Kind",
    "Quantized",
    "SparseUpdate",
    "Stamp",
    "SumEncoder",
    "SumUpdate",
    "Summand",
    "Update",
    "add_entries_",
    "counts_of",
    "decode",
    "decode_all",
    "decode_sum",
    "encode",
    "encode_dense",
    "encode_sum",
    "framed",
    "pack",
    "payload_sizes",
    "quantize",
    "read_kind",
]
