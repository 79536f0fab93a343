"""Quanta: thresholds as whole steps of the grid."""

from daskdl.errors import CodecError

# 22 of float32's 24 bits: a quantum times a small multiple stays exact.
MAX_COUNT = 2**22


def count_of(threshold: float, grid: float) -> int:
    """Return how many steps of the grid a received quantum is.

    Raises:
        CodecError: If it is not a whole number of steps in [1, 2**22].

    Example:
        >>> count_of(0.75, grid=0.25)
        3
    """
    count = threshold / grid
    if not (1 <= count <= MAX_COUNT and count == int(count)):
        raise CodecError(
            f"threshold must be 1 to {MAX_COUNT} whole steps of {grid}, got {threshold}"
        )
    return int(count)
