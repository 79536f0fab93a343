"""Updates as bytes and back: numpy in, numpy out; no torch, no Dask, no state."""

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
    read_stamp,
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
    "read_stamp",
]
