"""States of torchmetrics as values that can be added up, in any order.

A state of a metric says how its parts become one: as a sum, a mean, the largest, the
smallest, or all of them, one after the other, for a function or the metric itself.
Sums are kept with what their rounding lost, so that it makes no difference in which
order parts come; what is kept whole knows its part, and is put in order in the end.
Arrays are numpy's, which Dask sends without a copy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

from daskdl.errors import DataError

Array = np.ndarray[Any, Any]
Reduction = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Total:
    """A sum: of integers exact, of floats to about twice their digits.

    Attributes:
        sum: Rounded, float64 if it is of floats.
        lost: What rounding took from it (Knuth's two-sum); 0 for integers.
        dtype: Of the state.
    """

    sum: Array
    lost: Array
    dtype: torch.dtype

    @classmethod
    def of(cls, state: Tensor, weight: int = 1) -> Self:
        """One part's term, weighted."""
        wide = _wide(state.dtype)
        product = array_of(state.to(wide) * weight)
        return cls(product, np.zeros_like(product), state.dtype)

    def __add__(self, other: "Total") -> "Total":
        _check_alike(self.sum, other.sum)
        with np.errstate(invalid="ignore"):  # of inf nothing is lost
            total = self.sum + other.sum
            ours = total - other.sum
            lost = (self.sum - ours) + (other.sum - (total - ours))
            lost = self.lost + other.lost + np.where(np.isfinite(total), lost, 0)
        return Total(np.asarray(total), lost, self.dtype)

    def value(self, divisor: int = 1) -> Tensor:
        """The state again."""
        total = np.asarray(self.sum + self.lost)
        return tensor_of(total if divisor == 1 else total / divisor, self.dtype)


@dataclass(frozen=True)
class Mean:
    """A mean over rows: parts weigh by theirs, not each the same.

    Attributes:
        total: Of means times rows.
        rows: Of all parts.
    """

    total: Total
    rows: int

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.rows + other.rows)

    def value(self) -> Tensor:
        """The state again."""
        return self.total.value(self.rows)


@dataclass(frozen=True)
class Extreme:
    """The largest, or the smallest.

    Attributes:
        array: Of the parts so far.
        largest: Which of both.
        dtype: Of the state.
    """

    array: Array
    largest: bool
    dtype: torch.dtype

    def __add__(self, other: "Extreme") -> "Extreme":
        _check_alike(self.array, other.array)
        chosen = np.maximum if self.largest else np.minimum  # both keep NaN, as torch
        return Extreme(chosen(self.array, other.array), self.largest, self.dtype)

    def value(self) -> Tensor:
        """The state again."""
        return tensor_of(self.array, self.dtype)


@dataclass(frozen=True)
class Whole(Generic[T]):
    """What is kept whole, in the order of the parts.

    Attributes:
        parts: What each has, by its number.
        listed: Whether the state is a list, else it is a tensor.
    """

    parts: Mapping[int, list[T]]
    listed: bool

    def __add__(self, other: "Whole[T]") -> "Whole[T]":
        return Whole({**self.parts, **other.parts}, self.listed)

    def value(self, reduction: Reduction | None) -> Any:
        """The state again; of one part as it was, for there is nothing to reduce."""
        flat = [_unpacked(one) for n in sorted(self.parts) for one in self.parts[n]]
        if reduction is dim_zero_cat:
            return dim_zero_cat(flat) if flat else []
        if len(self.parts) == 1:
            return flat if self.listed else flat[0]
        both = flat if self.listed else torch.stack(flat)
        return both if reduction is None else reduction(both)


Value = Total | Mean | Extreme | Whole[Any]


@dataclass(frozen=True)
class _Packed:
    """A tensor on its way."""

    array: Array
    dtype: torch.dtype


def value_of(
    state: Tensor | list[Any],
    reduction: Reduction | None,
    rows: int,
    part: int,
) -> Value:
    """What a state of one part adds.

    Args:
        state: Of a metric that has been updated with that part.
        reduction: What torchmetrics has for it.
        rows: Of the part, > 0.
        part: Its number.
    """
    if isinstance(state, list):
        whole = state
        if reduction is dim_zero_cat and state:
            whole = [dim_zero_cat(state)]
        return Whole({part: [_packed(one) for one in whole]}, listed=True)
    if reduction is dim_zero_sum:
        return Total.of(state)
    if reduction is dim_zero_mean:
        return Mean(Total.of(state, rows), rows)
    if reduction in (dim_zero_max, dim_zero_min):
        return Extreme(array_of(state), reduction is dim_zero_max, state.dtype)
    return Whole({part: [_packed(state)]}, listed=False)


def state_of(value: Value, reduction: Reduction | None) -> Any:
    """What a state is after all parts, as `value_of` was given it for one."""
    return value.value(reduction) if isinstance(value, Whole) else value.value()


def array_of(tensor: Tensor) -> Array:
    """The numbers of a tensor, wherever it is; bfloat16, which numpy lacks, wider."""
    tensor = tensor.detach().cpu()
    array: Array = (
        tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def tensor_of(array: Array, dtype: torch.dtype) -> Tensor:
    """A tensor of its own."""
    return torch.from_numpy(np.array(array)).to(dtype)


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Packed(array_of(value), value.dtype)
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Packed):
        return tensor_of(value.array, value.dtype)
    return value


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _check_alike(one: Array, two: Array) -> None:
    if one.shape != two.shape:
        raise DataError(
            f"a metric has a state of shape {one.shape} in one part of the data and "
            f"{two.shape} in another, and they cannot be added up"
        )
