"""Normalizers: statistics of x from one pass over the data, and the scaling they imply.

Statistics are merged in the order of the parts, so the result does not depend on the
order in which parts complete.
"""

import contextlib
import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from daskdl.config import check_choice
from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.distribute import map_parts
from daskdl.data.inputs import source_of, with_columns
from daskdl.data.named_columns import NO_COLUMNS, Columns, FittedTransform
from daskdl.data.source import STREAMED_ROWS, Source
from daskdl.data.tables import as_numpy
from daskdl.errors import DataError, OptionError

Per = Literal["feature", "channel", "all"]

# Size of the slices that are converted to float64: a complete part of uint8 would take
# eight times its memory.
_SLICE_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of an array in float64, for each group of values.

    All arrays have the shape of a row, with size 1 in the axes that a group spans.
    The rounding error of the mean is kept: without it, the difference between two means
    near 1e8 has an error of 1e-8, and the deviation is wrong in its tenth digit.
    """

    count: int  # number of values in a group
    mean: np.ndarray
    rounding: np.ndarray  # error of the mean
    squares: np.ndarray  # sum of the squared distances from the mean
    low: np.ndarray
    high: np.ndarray

    @property
    def deviation(self) -> np.ndarray:
        """The standard deviation as in numpy, with the divisor `count`."""
        return np.sqrt(self.squares / self.count)

    def merged(self, added: "Statistics") -> "Statistics":
        """Return the statistics of the values of both arrays.

        Source:
            Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
            sample variances (1979). No intermediate result is larger than the squares
            themselves, unlike with sums of x and of x squared. The rounding error of
            the mean is an addition.
        """
        count = self.count + added.count
        distance = (added.mean - self.mean) + (added.rounding - self.rounding)
        mean, rounding = _sum(
            self.mean, self.rounding + distance * (added.count / count)
        )
        weight = self.count * added.count / count
        return Statistics(
            count,
            mean,
            rounding,
            self.squares + added.squares + distance**2 * weight,
            np.minimum(self.low, added.low),
            np.maximum(self.high, added.high),
        )


def statistics_of(values: np.ndarray, per: Per) -> Statistics:
    """Compute the statistics of at least one row; see `Normalizer` for `per`.

    Raises:
        DataError: If a value is NaN or infinite; the message begins with its index.
    """
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        index = np.unravel_index(np.argmin(finite), finite.shape)
        shown = ", ".join(str(i) for i in index)
        raise DataError(f"[{shown}] is {values[index]}")
    group_axes = {"feature": (0,), "channel": (0, *range(2, values.ndim))}
    axes = group_axes.get(per, tuple(range(values.ndim)))
    row_bytes = 8 * max(values[0].size, 1)
    rows = max(_SLICE_BYTES // row_bytes, 1)
    slices = (values[i : i + rows] for i in range(0, len(values), rows))
    return functools.reduce(Statistics.merged, (_of_slice(s, axes) for s in slices))


def _of_slice(values: np.ndarray, axes: tuple[int, ...]) -> Statistics:
    wide = values.astype(np.float64)
    low = wide.min(axes, keepdims=True)
    high = wide.max(axes, keepdims=True)
    # Distances from one of the values keep the digits that a large offset would cost,
    # and are zero where all values are equal.
    wide -= low
    distance = wide.mean(axes, keepdims=True)
    wide -= distance
    squares = np.square(wide, out=wide).sum(axes, keepdims=True)
    count = wide.size // max(distance.size, 1)
    mean, rounding = _sum(low[0], distance[0])
    return Statistics(count, mean, rounding, squares[0], low[0], high[0])


def _sum(large: np.ndarray, small: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and its rounding error."""
    total = large + small
    return total, small - (total - large)


# float32 holds every value of these dtypes.
_EXACT_IN_FLOAT32 = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.bfloat16, torch.float16, torch.float32),
)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Scale the values of one array: ``(values - shift) / scale + offset``.

    `shift` and `scale` are float64 in the shape of a row, with size 1 in some axes
    where values share a scaling; `scale` is nowhere 0.

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
            array = np.array(getattr(self, name), np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def apply(self, values: Any) -> Any:
        """Return scaled values in float32: an array for an array, or a tensor."""
        if isinstance(values, np.ndarray):
            return self.apply(_copied(values)).numpy()
        self._check(values)
        if values.dtype in _EXACT_IN_FLOAT32:
            # As exact as in float64: a second step subtracts the rounding error of the
            # shift.
            high = self.shift.astype(np.float32)
            distance = values.float() - _like(high, values, torch.float32)
            distance -= _like(self.shift - high, values, torch.float32)
            return distance / _like(self.scale, values, torch.float32) + self.offset
        distance = values.double() - _like(self.shift, values, torch.float64)
        wide = distance / _like(self.scale, values, torch.float64) + self.offset
        return wide.float()

    def inverse(self, values: Any) -> Any:
        """Return the values before the scaling, in the dtype of `values`."""
        if isinstance(values, np.ndarray):
            return self.inverse(_copied(values)).numpy()
        self._check(values)
        scaled = (values.double() - self.offset) * _like(
            self.scale, values, torch.float64
        )
        return (scaled + _like(self.shift, values, torch.float64)).to(values.dtype)

    @override
    def __eq__(self, scaling: object) -> bool:
        if not isinstance(scaling, Scaling):
            return NotImplemented
        return (
            np.array_equal(self.shift, scaling.shift)
            and np.array_equal(self.scale, scaling.scale)
            and self.offset == scaling.offset
        )

    @override
    def __hash__(self) -> int:
        return hash((self.shift.tobytes(), self.scale.tobytes(), self.offset))

    @override
    def __reduce__(self) -> Any:
        return Scaling, (self.shift, self.scale, self.offset)  # read-only again

    def rounded(self) -> tuple[Any, ...]:
        """Return shift, scale and offset as plain numbers, rounded to float32."""
        numbers = (self.shift, self.scale, np.array(self.offset))
        return tuple(array.astype(np.float32).tolist() for array in numbers)

    def _check(self, values: Tensor) -> None:
        row = tuple(values.shape[1:])
        fits = len(row) == self.shift.ndim and all(
            n in (1, size) for n, size in zip(self.shift.shape, row, strict=True)
        )
        if not fits:
            raise DataError(
                f"rows of shape {row} cannot be scaled by {self.shift.shape} numbers; "
                "fit the normalizer on rows of this shape, or with per='channel'"
            )


def _copied(values: np.ndarray) -> Tensor:
    # Arrays of a source are read-only, which torch warns about.
    return torch.from_numpy(np.array(as_numpy(values)))


def _like(numbers: np.ndarray, values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=values.device)


@dataclass(frozen=True)
class Normalization(FittedTransform):
    """A fitted normalizer, which scales x; used as a `transform`.

    A trainer puts the columns of tables into the order of those that the normalizer was
    fitted on.

    Attributes:
        scalings: A tree like x, with a :class:`Scaling` for each array that is scaled
            and None for the others.
        columns: Column names of the tables that it was fitted on, by their place in x:
            ``{"X": ("age", "height")}``.

    Example:
        >>> from daskdl.data.normalize import Standardize
        >>> fitted = Standardize().fit(np.array([[1.0], [3.0]]), client=False)
        >>> x, y = fitted((np.array([[1.0], [2.0]]), None))
        >>> x
        array([[-1.],
               [ 0.]], dtype=float32)
        >>> Normalization.from_dict(fitted.to_dict()) == fitted
        True
    """

    scalings: Tree
    columns: Columns = field(default_factory=dict, hash=False)

    def transform(self, batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Scale x of a batch.

        Args:
            batch: (x, y), trees of tensors on any device, or of numpy arrays, with rows
                along the first axis.

        Returns:
            (x, y): scaled arrays of x in float32; others, and y, unchanged.

        Raises:
            DataError: If x has another structure, or rows of another shape, than the
                data that the normalizer was fitted on.
        """
        x, y = batch
        return self._mapped(Scaling.apply, x), y

    __call__ = transform

    def inverse(self, x: Tree) -> Tree:
        """Return x before the scaling.

        Args:
            x: A tree of tensors or arrays, as returned by `transform`.

        Raises:
            DataError: If x has another structure, or rows of another shape.
        """
        return self._mapped(Scaling.inverse, x)

    @property
    @override
    def digest(self) -> str:
        """The first digits of a SHA-256 of the numbers, rounded to float32.

        The numbers are rounded because another partitioning of the same rows changes
        the last digits of the statistics.
        """
        rounded = [
            (name, None if scaling is None else scaling.rounded())
            for name, scaling in batching.named_leaves(self.scalings, "x")
        ]
        return hashlib.sha256(repr(rounded).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return lists, dicts, strings and numbers, which JSON represents exactly."""
        columns = {place: [*names] for place, names in self.columns.items()}
        return {"x": _scalings_to_json(self.scalings), "columns": columns}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Return the normalization whose `to_dict` returned `plain`.

        Raises:
            OptionError: If `to_dict` cannot have returned `plain`.
        """
        try:
            columns = plain["columns"].items()
            return cls(
                _scalings_from_json(plain["x"]),
                {place: tuple(names) for place, names in columns},
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise OptionError(
                f"this is not what Normalization.to_dict() returns: {error!r}"
            ) from error

    def _mapped(self, function: Any, x: Tree) -> Tree:
        if not _alike(x, self.scalings):
            raise DataError(
                "the normalizer was fitted on x like "
                f"{batching.outline(self.scalings)}, got {batching.outline(x)}"
            )
        return batching.tree_map(
            lambda leaf, scaling: leaf if scaling is None else function(scaling, leaf),
            x,
            self.scalings,
        )


def _alike(left: Tree, right: Tree) -> bool:
    """Whether two trees have the same structure, in any order of keys."""
    return (
        dict(batching.named_leaves(left, "")).keys()
        == dict(batching.named_leaves(right, "")).keys()
    )


def _scalings_to_json(tree: Tree) -> Any:
    # A dict as pairs, because JSON turns keys that are numbers into strings.
    if isinstance(tree, dict):
        pairs = [[key, _scalings_to_json(child)] for key, child in tree.items()]
        return {"dict": pairs}
    if isinstance(tree, tuple):
        return {"tuple": [_scalings_to_json(child) for child in tree]}
    if tree is None:
        return None
    shift, scale = tree.shift.tolist(), tree.scale.tolist()
    return {"shift": shift, "scale": scale, "offset": float(tree.offset)}


def _scalings_from_json(plain: Any) -> Tree:
    if plain is None:
        return None
    if "dict" in plain:
        return {key: _scalings_from_json(child) for key, child in plain["dict"]}
    if "tuple" in plain:
        return tuple(_scalings_from_json(child) for child in plain["tuple"])
    shift, scale = (np.array(plain[name]) for name in ("shift", "scale"))
    return Scaling(shift, scale, float(plain["offset"]))


T = TypeVar("T")
Keys = tuple[str | int, ...]


def _of_all(source: Source, per: Per, only: Keys | None, client: Any) -> Tree:
    """Compute the statistics of all parts in one pass."""
    function = functools.partial(_of_part, per=per, only=only)
    total = None
    # Closed immediately, not when the traceback of an error is released.
    with contextlib.closing(map_parts(source, function, client)) as results:
        for part, statistics in _by_part(results):
            if statistics is not None:
                total = _merged(total, statistics, source, part)
    if total is None:
        raise DataError("X has no rows to fit a normalizer on")
    return total


def _of_part(source: Source, part: int, per: Per, only: Keys | None) -> Tree | None:
    """Compute the statistics of a part; None if it has no rows."""

    def of_leaf(name: str, leaf: np.ndarray) -> Statistics:
        try:
            return statistics_of(leaf, per)
        except DataError as error:
            offset = f", its rows counted from {start}" if start else ""
            raise DataError(
                f"{source.name(part)}{offset}: {name}{error}; a normalizer needs "
                "finite numbers, remove such rows or fill them in"
            ) from error

    total, start = None, 0
    for x, _ in source.stream(part, STREAMED_ROWS):
        if batching.length(x):
            statistics = batching.tree_map(of_leaf, _names(x, only), x)
            total = _merged(total, statistics, source, part)
        start += batching.length(x)
    return total


def _names(x: Tree, only: Keys | None) -> Tree:
    """Return a tree like x with the name of each array, or None if it is not scaled."""
    names = [name for name, _ in batching.named_leaves(x, "x")]
    starts = ("x",) if only is None else tuple(f"x[{key!r}]" for key in only)
    for key, start in zip(only or (), starts, strict=False):
        if not any(name.startswith(start) for name in names):
            raise OptionError(
                f"only must hold keys of x, got {key!r} for x like "
                f"{batching.outline(x)}"
            )
    return batching.with_leaves(
        x, [name if name.startswith(starts) else None for name in names]
    )


def _merged(total: Tree | None, added: Tree, source: Source, part: int) -> Tree:
    """Merge the statistics of a part, or of some of its rows, with those before."""

    def merged(before: Statistics, new: Statistics) -> Statistics:
        if before.mean.shape != new.mean.shape:
            raise DataError(
                f"{source.name(part)} has rows of shape {new.mean.shape}, those before "
                f"have {before.mean.shape}; use per='channel' for images of several "
                "sizes"
            )
        return before.merged(new)

    if total is None:
        return added
    if not _alike(total, added):
        raise DataError(
            f"x of {source.name(part)} is like {batching.outline(added)}, "
            f"those before are like {batching.outline(total)}"
        )
    return batching.tree_map(merged, total, added)


def _by_part(results: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
    """Yield results in the order of the parts, and hold results of later parts."""
    waiting: dict[int, T] = {}
    following = 0
    for part, result in results:
        waiting[part] = result
        while following in waiting:
            yield following, waiting.pop(following)
            following += 1


@dataclass(frozen=True, kw_only=True)
class Normalizer(ABC):
    """Derive a scaling from statistics of the data.

    Attributes:
        per: "feature": one scaling for each position in a row; "channel": one for each
            index of the second axis, as in images of shape (rows, channels, height,
            width), which may then differ in size; "all": one for the complete array.
        only: Keys of x, a dict or a tuple, that are scaled; the others do not change.
            None: all.

    Raises:
        OptionError: If an attribute has an invalid value.
    """

    per: Per = "feature"
    only: tuple[str | int, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("per", self.per, get_args(Per))
        if self.only is not None and not isinstance(self.only, tuple):
            raise OptionError(
                f"only must be a tuple of keys of x, got {self.only!r}; "
                f"for one key use ({self.only!r},)"
            )

    @abstractmethod
    def scaling(self, statistics: Statistics) -> Scaling:
        """Return the scaling of an array with these statistics."""

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        client: Any = None,
    ) -> Normalization:
        """Compute the statistics in one pass over the data, on the workers.

        Args:
            X: Any data that `Trainer.fit` accepts.
            y: Labels; they are ignored.
            client: A `distributed.Client`. None: the default client, if there is one,
                otherwise this process. False: this process.

        Returns:
            The scaling of x, to be passed as `transform`.

        Raises:
            DataError: If a value is NaN or infinite (the message names the part and the
                array), if the parts differ in shape or structure, or if the data cannot
                be used.
            OptionError: If x lacks a key of `only`.
        """
        source = with_columns(source_of(X, y, labelled=False), client)
        statistics = _of_all(source, self.per, self.only, client)
        columns = (source.columns or NO_COLUMNS).items()
        return Normalization(
            batching.tree_map(self.scaling, statistics),
            {place: names for place, names in columns if place.startswith("X")},
        )


@dataclass(frozen=True)
class Standardize(Normalizer):
    """Scale values to mean 0 and standard deviation 1, as numpy computes them.

    Constant values are divided by 1, so they become 0.

    Attributes:
        epsilon: Values with at most this standard deviation count as constant, >= 0.

    Example:
        >>> fitted = Standardize().fit(np.array([[1.0, 7.0], [3.0, 7.0]]), client=False)
        >>> fitted.scalings.shift, fitted.scalings.scale
        (array([2., 7.]), array([1., 1.]))
    """

    epsilon: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise OptionError(f"epsilon must be finite and >= 0, got {self.epsilon}")

    @override
    def scaling(self, statistics: Statistics) -> Scaling:
        deviation = statistics.deviation
        return Scaling(
            statistics.mean, np.where(deviation <= self.epsilon, 1.0, deviation)
        )


@dataclass(frozen=True)
class MinMax(Normalizer):
    """Scale the lowest value to `low` and the highest to `high`.

    Values outside the range of the data are not clipped. Constant values become `low`.

    Attributes:
        low: Result for the lowest value.
        high: Result for the highest value, > low.

    Example:
        >>> fitted = MinMax(-1, 1).fit(np.array([[0], [255]], "uint8"), client=False)
        >>> fitted.transform((np.array([[51]], "uint8"), None))[0]
        array([[-0.6]], dtype=float32)
    """

    low: float = 0.0
    high: float = 1.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.high - self.low) and self.low < self.high):
            raise OptionError(
                f"low and high must be finite and low < high, got {self.low} and "
                f"{self.high}"
            )

    @override
    def scaling(self, statistics: Statistics) -> Scaling:
        extent = (statistics.high - statistics.low) / (self.high - self.low)
        return Scaling(
            statistics.low, np.where(extent > 0, extent, 1.0), float(self.low)
        )
