"""Named arrays as one sequence of bytes, which travels in parts of bounded size.

Shape suffix: B = bytes.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 4 * 2**20  # of one answer: so much passes a slow link within a time-out

Arrays = Mapping[str, NDArray[Any]]
Form = Sequence[Any]  # name, dtype and shape of an array: plain values


class Parcel:
    """Arrays, and how to cut their bytes.

    Args:
        arrays: Not changed any more.

    Example:
        >>> parcel = Parcel({"a": np.arange(3), "b": np.float32([0.5])})
        >>> joined = join(parcel.forms, [parcel.part(i) for i in range(parcel.parts)])
        >>> joined["a"].tolist(), joined["b"].tolist()
        ([0, 1, 2], [0.5])
    """

    def __init__(self, arrays: Arrays) -> None:
        self.forms: list[Form] = [
            (name, array.dtype.str, list(array.shape)) for name, array in arrays.items()
        ]
        self._views_B = [_bytes_of(array) for array in arrays.values()]
        ends = list(accumulate(view_B.size for view_B in self._views_B))
        self._ends = ends
        self.nbytes = ends[-1] if ends else 0

    @property
    def parts(self) -> int:
        """How many there are, >= 1."""
        return max(1, -(-self.nbytes // PART_BYTES))

    def part(self, number: int) -> NDArray[np.uint8]:
        """The bytes of one part, from 0; without a copy where it is of one array.

        Raises:
            ValueError: If there is no such part.
        """
        if not 0 <= number < self.parts:
            raise ValueError(f"part must be in 0 .. {self.parts - 1}, got {number}")
        start = number * PART_BYTES
        stop = min(start + PART_BYTES, self.nbytes)
        cut = []
        for view_B, end in zip(self._views_B, self._ends, strict=True):
            first = end - view_B.size
            if first < stop and end > start:
                cut.append(view_B[max(start - first, 0) : stop - first])
        if len(cut) == 1:
            return cut[0]
        return np.concatenate(cut) if cut else np.empty(0, np.uint8)


def join(
    forms: Sequence[Form], parts: Sequence[NDArray[np.uint8]]
) -> dict[str, NDArray[Any]]:
    """Make arrays of the parts of a parcel; they may be read-only.

    Args:
        forms: Of the parcel.
        parts: All of them, in order.

    Raises:
        ValueError: If they do not go together.
    """
    whole_B = parts[0] if len(parts) == 1 else np.concatenate(parts)
    shapes = {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in forms}
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values()]
    if sum(sizes) != whole_B.size:
        raise ValueError(
            f"need {sum(sizes)} bytes for {len(sizes)} arrays, got {whole_B.size}"
        )
    arrays, start = {}, 0
    for (name, (dtype, shape)), size in zip(shapes.items(), sizes, strict=True):
        piece_B = whole_B[start : start + size]
        if start % dtype.alignment:
            piece_B = piece_B.copy()
        arrays[name] = piece_B.view(dtype).reshape(shape)
        start += size
    return arrays


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
