"""Count, mean, variance, lowest and highest value, of parts that are then merged.

Numpy in float64 only; where the parts come from is said in
:mod:`daskdl.data.normalising.fitting`.
"""

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from daskdl.errors import DataError, OptionError

Per = Literal["feature", "channel", "all"]

# Of float64 at a time: a part of bytes would otherwise take eight times its memory.
_SLICE_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of the values of an array, in float64, one each for what is counted together.

    Attributes:
        count: Values that are counted together.
        mean: Shape of a row, with 1 in the axes that are counted together.
        rest: What rounding took from the mean; like `mean`. Without it two means near
            1e8 are 1e-8 too far apart, and the deviation is wrong in its tenth digit.
        squares: Sum of the squared distances from the mean; like `mean`.
        low: Lowest value; like `mean`.
        high: Highest value; like `mean`.
    """

    count: int
    mean: np.ndarray
    rest: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def deviation(self) -> np.ndarray:
        """The standard deviation, as numpy's: divided by the count, not one less."""
        return np.sqrt(self.squares / self.count)

    def merged(self, other: "Statistics") -> "Statistics":
        """Those of both together.

        Args:
            other: Of the same shape.

        Source:
            Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
            sample variances (1979). Nothing gets larger than the squares themselves,
            unlike with sums of x and of x squared. The rest is ours.
        """
        count = self.count + other.count
        distance = (other.mean - self.mean) + (other.rest - self.rest)
        mean, rest = _sum(self.mean, self.rest + distance * (other.count / count))
        weight = self.count * other.count / count
        return Statistics(
            count,
            mean,
            rest,
            self.squares + other.squares + distance**2 * weight,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )


def check_per(per: object) -> None:
    """Refuse what is not a way to count values together.

    Raises:
        OptionError: If it is anything else; the message has the value.
    """
    if per not in get_args(Per):
        allowed = ", ".join(map(repr, get_args(Per)))
        raise OptionError(f"per must be one of {allowed}, got {per!r}")


def statistics_of(values: np.ndarray, per: Per) -> Statistics:
    """The statistics of one array that is here.

    Args:
        values: Rows first, at least one; numbers of any dtype, read only.
        per: "feature": each place in a row for itself; "channel": all but the second
            axis is counted together; "all": one number for the whole array.

    Raises:
        DataError: If a value is NaN or infinite; the message begins with its index.

    Example:
        >>> found = statistics_of(np.array([[1, 5], [3, 5]]), "feature")
        >>> found.mean, found.deviation
        (array([2., 5.]), array([1., 0.]))
    """
    _check_finite(values)
    together = {"feature": (0,), "channel": (0, *range(2, values.ndim))}
    axes = together.get(per, tuple(range(values.ndim)))
    bytes_of_row = 8 * max(values[0].size, 1)
    rows = max(_SLICE_BYTES // bytes_of_row, 1)
    slices = (values[i : i + rows] for i in range(0, len(values), rows))
    return functools.reduce(Statistics.merged, (_of_slice(s, axes) for s in slices))


def _of_slice(values: np.ndarray, axes: tuple[int, ...]) -> Statistics:
    wide = values.astype(np.float64)
    low = wide.min(axes, keepdims=True)
    high = wide.max(axes, keepdims=True)
    # Distances from any value of the same size keep the digits that a large offset
    # would take, and are zero where all values are the same.
    first = tuple(slice(1) if i in axes else slice(None) for i in range(wide.ndim))
    one = wide[first].copy()
    wide -= one
    distance = wide.mean(axes, keepdims=True)
    wide -= distance
    squares = np.square(wide, out=wide).sum(axes, keepdims=True)
    count = wide.size // max(distance.size, 1)
    mean, rest = _sum(one[0], distance[0])
    return Statistics(count, mean, rest, squares[0], low[0], high[0])


def _sum(large: np.ndarray, small: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum, and what rounding took from it."""
    total = large + small
    return total, small - (total - large)


def _check_finite(values: np.ndarray) -> None:
    if values.dtype.kind != "f":
        return
    finite = np.isfinite(values)
    if not finite.all():
        index = np.unravel_index(np.argmin(finite), finite.shape)
        shown = ", ".join(str(i) for i in index)
        raise DataError(f"[{shown}] is {values[index]}")
