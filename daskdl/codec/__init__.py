"""Updates as bytes and back: numpy in, numpy out; no torch, no Dask, no state.

:func:`encode` writes entries as the smallest frame, :func:`decode` reads a frame and
checks every byte of it: it is the only place where what comes from another process is
checked, so that nothing behind it looks again. Behind the two lie a module for each way
to pack: Golomb-Rice coded gaps (:mod:`daskdl.codec.golomb`), a bitmap
(:mod:`daskdl.codec.sparse`) and eight bits per parameter (:mod:`daskdl.codec.dense8`).
"""

from daskdl.codec.dense8 import Quantized, counts_of, quantize
from daskdl.codec.frame import (
    DenseUpdate,
    Kind,
    SparseUpdate,
    Stamp,
    Update,
    decode,
    encode,
    encode_dense,
    encode_dense8,
    payload_sizes,
    read_kind,
)

__all__ = [
    "DenseUpdate",
    "Kind",
    "Quantized",
    "SparseUpdate",
    "Stamp",
    "Update",
    "counts_of",
    "decode",
    "encode",
    "encode_dense",
    "encode_dense8",
    "payload_sizes",
    "quantize",
    "read_kind",
]
