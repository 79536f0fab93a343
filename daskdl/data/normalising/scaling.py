"""(x - shift) / scale + offset, on torch tensors of any device and numpy arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from daskdl.data.arrays import as_numpy
from daskdl.errors import DataError

# Every value of theirs is one of float32.
_EXACT_IN_FLOAT32 = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.bfloat16,
        torch.float16,
        torch.float32,
    }
)


@dataclass(frozen=True, eq=False)
class Scaling:
    """How the values of one array are scaled; equal if all numbers are.

    Attributes:
        shift: What is subtracted, float64, in the shape of a row or with 1 in some of
            its axes.
        scale: What is then divided by, like `shift`, nowhere 0.
        offset: What is then added.

    Example:
        >>> scaling = Scaling(np.array([10.0]), np.array([5.0]), 0.0)
        >>> scaling.apply(torch.tensor([[10], [20]]))
        tensor([[0.],
                [2.]])
    """

    shift: np.ndarray
    scale: np.ndarray
    offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shift", "scale"):
            own = np.array(getattr(self, name), np.float64)
            own.flags.writeable = False
            object.__setattr__(self, name, own)

    def apply(self, values: Any) -> Any:
        """Scaled values.

        Args:
            values: A tensor or an array, rows first; integers or floats; read only.

        Returns:
            The same kind and shape, float32, on the same device.

        Raises:
            DataError: If the rows have another shape than those scaled by.
        """
        if isinstance(values, np.ndarray):
            return self.apply(_copied(values)).numpy()
        self._check(values)
        if values.dtype in _EXACT_IN_FLOAT32:
            # As exact as in float64: what is left of the shift comes second.
            high = self.shift.astype(np.float32)
            distance = values.float() - _like(high, values, torch.float32)
            distance -= _like(self.shift - high, values, torch.float32)
            return distance / _like(self.scale, values, torch.float32) + self.offset
        distance = values.double() - _like(self.shift, values, torch.float64)
        wide = distance / _like(self.scale, values, torch.float64) + self.offset
        return wide.float()

    def inverse(self, values: Any) -> Any:
        """The values before they were scaled.

        Args:
            values: As `apply` returns them, or wider.

        Returns:
            The same kind, shape and dtype, on the same device.

        Raises:
            DataError: If the rows have another shape than those scaled by.
        """
        if isinstance(values, np.ndarray):
            return self.inverse(_copied(values)).numpy()
        self._check(values)
        shift, scale = (
            _like(a, values, torch.float64) for a in (self.shift, self.scale)
        )
        return ((values.double() - self.offset) * scale + shift).to(values.dtype)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scaling):
            return NotImplemented
        return (
            np.array_equal(self.shift, other.shift)
            and np.array_equal(self.scale, other.scale)
            and self.offset == other.offset
        )

    @override
    def __hash__(self) -> int:
        return hash((self.shift.tobytes(), self.scale.tobytes(), self.offset))

    @override
    def __reduce__(self) -> Any:
        return Scaling, (self.shift, self.scale, self.offset)  # read only there too

    def _check(self, values: Tensor) -> None:
        row = tuple(values.shape[1:])
        fits = len(row) == self.shift.ndim and all(
            fitted in (1, size)
            for fitted, size in zip(self.shift.shape, row, strict=True)
        )
        if not fits:
            raise DataError(
                f"rows of shape {row} cannot be scaled by {self.shift.shape} numbers; "
                "fit the normaliser on rows of this shape, or with per='channel'"
            )


def _copied(values: np.ndarray) -> Tensor:
    # What a source loads is read only, of which torch warns.
    return torch.from_numpy(np.array(as_numpy(values)))


def _like(numbers: np.ndarray, values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=values.device)
