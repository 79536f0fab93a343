"""Updates as bytes and back: numpy in, numpy out; no torch, no Dask, no state."""

from daskdl.codec.frames import (
    DenseUpdate,
    SparseUpdate,
    Update,
    decode,
    encode,
    encode_dense,
    payload_sizes,
)
from daskdl.codec.header import Kind, Stamp, read_stamp

__all__ = [
    "DenseUpdate",
    "Kind",
    "SparseUpdate",
    "Stamp",
    "Update",
    "decode",
    "encode",
    "encode_dense",
    "payload_sizes",
    "read_stamp",
]
