"""An update as one frame and back: choose the smallest kind, check everything.

numpy in, numpy out; no torch, no Dask, no state.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from daskdl.codec import bitmap, dense8, gaps, gaps_reading
from daskdl.codec.dense8 import Quantized, check_counts
from daskdl.codec.entries import positions_of
from daskdl.codec.header import (
    DENSE_KINDS,
    LAYOUT,
    Header,
    Kind,
    Stamp,
    bytes_of,
    check_fields,
    check_size,
    unpack_header,
)
from daskdl.codec.payloads import open_payload, seal
from daskdl.errors import CodecError

SPARSE_KINDS = (Kind.RAW32, Kind.GAPS, Kind.BITMAP)


class SparseUpdate(NamedTuple):
    """Quanta at some of the positions."""

    stamp: Stamp
    kind: Kind
    size: int  # N
    threshold: float  # one quantum, parameter units
    entries_K: npt.NDArray[np.int32]  # signed one-based positions, ascending


class DenseUpdate(NamedTuple):
    """A count of grid steps for every parameter."""

    stamp: Stamp
    size: int  # N
    grid: float  # one step, parameter units
    counts_N: npt.NDArray[np.int32]


Update = SparseUpdate | DenseUpdate


def encode(
    stamp: Stamp,
    size: int,
    threshold: float,
    entries_K: npt.NDArray[np.int32],
    kind: Kind | None = None,
) -> npt.NDArray[np.uint8]:
    """Write entries as a frame, by default of the smallest kind.

    Args:
        stamp: Which update this is.
        size: N, at most 2**31 - 1.
        threshold: One quantum, parameter units, > 0 and exact in float32.
        entries_K: ``+(i + 1)`` for ``+threshold`` at position ``i``,
            ``-(i + 1)`` for ``-threshold``; int32, strictly ascending in
            position. None at all make a frame of a header only.
        kind: RAW32, GAPS or BITMAP; None takes the one with the fewest bytes
            by :func:`payload_sizes`, of equals the first in this order.

    Returns:
        The frame, uint8, one-dimensional, an array of its own.

    Raises:
        CodecError: If an argument is not as above.

    Example:
        >>> import numpy as np
        >>> stamp = Stamp(run=7, origin=1, sequence=12, step=40)
        >>> frame = encode(stamp, 10, 0.5, np.array([1, -4], np.int32))
        >>> decode(frame).entries_K
        array([ 1, -4], dtype=int32)

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015, for the entries. His 31-bit position and
        sign bit are our signed int32.
    """
    if kind is not None and kind not in SPARSE_KINDS:
        raise CodecError(f"kind must be one of {SPARSE_KINDS}, got {kind!r}")
    header = Header(stamp, Kind.RAW32, False, size, 0, threshold, 0)
    check_fields(header)
    positions_K = positions_of(entries_K, size)
    plan = gaps.plan(size, positions_K)
    if kind is None:
        sizes = sizes_with(plan, size, len(entries_K))
        kind = min(sizes, key=lambda candidate: sizes[candidate])
    if kind is Kind.RAW32:
        body = bytes_of_integers(entries_K)
    elif kind is Kind.GAPS:
        body = gaps.pack(plan, entries_K)
    else:
        body = bitmap.pack(size, positions_K, entries_K)
    return seal(header._replace(kind=kind, entries=len(entries_K)), body)


def encode_dense(
    stamp: Stamp, grid: float, counts_N: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    """Write a count of grid steps for every parameter as a DENSE32 frame.

    Args:
        stamp: Which update this is.
        grid: One step, parameter units, > 0 and exact in float32.
        counts_N: Steps, int32, any value; one-dimensional and not empty.

    Returns:
        The frame, uint8, one-dimensional, an array of its own.

    Raises:
        CodecError: If an argument is not as above.

    Example:
        >>> import numpy as np
        >>> frame = encode_dense(Stamp(7, 1, 12, 40), 0.25, np.array([3, -1], np.int32))
        >>> decode(frame).counts_N
        array([ 3, -1], dtype=int32)
    """
    check_counts(counts_N)
    header = Header(stamp, Kind.DENSE32, False, len(counts_N), 0, grid, 0)
    check_fields(header)
    return seal(header, bytes_of_integers(counts_N))


def encode_dense8(
    stamp: Stamp, grid: float, quantized: Quantized
) -> npt.NDArray[np.uint8]:
    """Write counts rounded to eight bits as a DENSE8 frame.

    Args:
        stamp: Which update this is.
        grid: One step, parameter units, > 0 and exact in float32.
        quantized: What :func:`quantize` returned; not empty.

    Returns:
        The frame, uint8, one-dimensional, an array of its own. It is read as
        :func:`counts_of` the same.

    Raises:
        CodecError: If an argument is not as above.

    Example:
        >>> import numpy as np
        >>> quantized = dense8.quantize(np.array([300, -1], np.int32))
        >>> decode(encode_dense8(Stamp(7, 1, 12, 40), 0.25, quantized)).counts_N
        array([300,   0], dtype=int32)
    """
    header = Header(stamp, Kind.DENSE8, False, len(quantized.values_N), 0, grid, 0)
    check_fields(header)
    return seal(header, dense8.pack(quantized))


def payload_sizes(size: int, entries_K: npt.NDArray[np.int32]) -> dict[Kind, int]:
    """Count the bytes each sparse kind would take; nothing is packed.

    Args:
        size: N.
        entries_K: As for :func:`encode`.

    Returns:
        Exact bytes of the body, before lz4 and without the 64 of the header.

    Raises:
        CodecError: If N or an entry is impossible.

    Example:
        >>> import numpy as np
        >>> payload_sizes(1000, np.arange(1, 1001, 10, dtype=np.int32))
        {<Kind.RAW32: 1>: 400, <Kind.GAPS: 2>: 77, <Kind.BITMAP: 3>: 138}
    """
    check_size(size)
    plan = gaps.plan(size, positions_of(entries_K, size))
    return sizes_with(plan, size, len(entries_K))


def sizes_with(plan: gaps.Plan, size: int, count: int) -> dict[Kind, int]:
    """Return :func:`payload_sizes` where the gaps are planned already."""
    return {
        Kind.RAW32: 4 * count,
        Kind.GAPS: plan.length,
        Kind.BITMAP: bitmap.length(size, count),
    }


def bytes_of_integers(values: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """View or copy int32 values as little-endian bytes."""
    return np.ascontiguousarray(values, "<i4").view(np.uint8)


def decode(frame: Buffer, *, run: int | None = None, size: int | None = None) -> Update:
    """Read a frame, checking every byte of it.

    What comes back can be applied without a further look: positions are in
    range and strictly ascending.

    Args:
        frame: What one of the functions above wrote, in any contiguous buffer.
            Never changed.
        run: Refuse updates of any other run.
        size: Refuse updates for any other number of parameters.

    Returns:
        The update. Its array has memory of its own, so that the frame may be
        freed and compiled consumers see one kind of array only.

    Raises:
        CodecError: If anything about the frame is not as documented in
            ``docs/wire-format.md``, or it is for another run or model.

    Example:
        >>> import numpy as np
        >>> frame = encode(Stamp(7, 1, 12, 40), 10, 0.5, np.array([3], np.int32))
        >>> decode(frame, run=8)
        Traceback (most recent call last):
        daskdl.errors.CodecError: frame of run 7, this is run 8
    """
    view = bytes_of(frame)
    header = unpack_header(view)
    if run is not None and header.stamp.run != run:
        raise CodecError(f"frame of run {header.stamp.run}, this is run {run}")
    if size is not None and header.size != size:
        raise CodecError(f"frame for {header.size} parameters, this model has {size}")
    body = open_payload(header, view[LAYOUT.size :])
    if header.kind in DENSE_KINDS:
        counts_N = unpack_counts(header, body)
        return DenseUpdate(header.stamp, header.size, header.threshold, counts_N)
    entries_K = unpack_entries(header, body)
    return SparseUpdate(
        header.stamp, header.kind, header.size, header.threshold, entries_K
    )


def unpack_entries(
    header: Header, body: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int32]:
    """Read the body of a sparse kind.

    Raises:
        CodecError: If it is not what K entries of N parameters make.
    """
    if header.kind is Kind.GAPS:
        return gaps_reading.unpack(body, header.size, header.entries)
    if header.kind is Kind.BITMAP:
        return bitmap.unpack(body, header.size, header.entries)
    entries_K = body.view("<i4").astype(np.int32)
    positions_of(entries_K, header.size)
    return entries_K


def unpack_counts(header: Header, body: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Read the body of a dense kind.

    Raises:
        CodecError: If eight bits and scales are not as documented.
    """
    if header.kind is Kind.DENSE8:
        return dense8.unpack(body, header.size)
    return body.view("<i4").astype(np.int32)
