"""From the items of a dataset to rows, as a ``DataLoader`` makes a batch of them.

No dataset here, and no parts: who has items asks for rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from daskdl.data import batching
from daskdl.data.arrays import as_numpy, check_array
from daskdl.data.batching import Rows, Tree
from daskdl.errors import DataError

PAIR = "for several inputs ((x1, x2), y), or use a collate_fn that returns (x, y)"


@dataclass(frozen=True)
class Collation:
    """How items become rows.

    The rule for the user's own function: it gets `batch_size` items at a time (the
    last time what is left), and what it returns has one row for each of them. It may
    pad to the longest item, so rows of two calls go into one batch only if all their
    axes but the first are equal.

    Attributes:
        function: The user's ``collate_fn``; None: torch's default one.
        batch_size: How many items the user's function gets; torch's gets any number.
        labelled: Whether items must be pairs (x, y). If not, a pair still is one,
            and anything else is x alone.

    Example:
        >>> Collation().rows([([1.0, 2.0], 0), ([3.0, 4.0], 1)])
        ((array([1., 3.]), array([2., 4.])), array([0, 1]))
    """

    function: Callable[[list[Any]], Any] | None = None
    batch_size: int = 1
    labelled: bool = True

    def rows(self, items: list[Any]) -> Rows:
        """Put items together, at least one.

        Raises:
            DataError: If they do not fit together, or what they make is no (x, y).
                What the user's own function raises comes out as it is.
        """
        if self.function is None:
            return self.pair(_collated(items))
        rows = self.pair(self.function(items))
        _check_rows(rows, len(items))
        return rows

    def pair(self, batch: Any) -> Rows:
        """Split what a collation has made into x and y, as trees of numpy arrays.

        Raises:
            DataError: If it is no pair although it must be, or if something in it is
                no array of numbers.
        """
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return _tree(batch[0], "x"), _tree(batch[1], "y")
        if self.labelled:
            raise DataError(
                f"a dataset must give pairs (x, y), got {_outline(batch)}; {PAIR}"
            )
        if isinstance(batch, tuple | list) and len(batch) == 1:
            batch = batch[0]  # of a TensorDataset with one tensor
        return _tree(batch, "x"), None


def _collated(items: list[Any]) -> Any:
    functions = {**default_collate_fn_map, Tensor: _stacked}
    try:
        return collate(items, collate_fn_map=functions)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(
            "items of the dataset cannot be put together: "
            f"{type(error).__name__}: {error}; make them arrays and numbers of equal "
            "shapes in tuples and dicts, or use a collate_fn"
        ) from error


def _stacked(batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """As torch's, but never into shared memory.

    Torch takes that where ``get_worker_info()`` is not None, as it may be here while
    another thread goes through an iterable dataset.
    """
    return torch.stack(list(batch))


def _tree(value: Any, name: str) -> Tree:
    if isinstance(value, Tensor | np.ndarray):
        check_array(value, name)
        return as_numpy(value)
    children = dict(_children(value))
    if not children:
        raise DataError(
            f"{name} of a dataset's items must be made of tensors, arrays and numbers "
            f"in tuples and dicts, got {_outline(value)}; convert it in the dataset, "
            "or use a collate_fn"
        )
    inner = {key: _tree(child, f"{name}[{key!r}]") for key, child in children.items()}
    if isinstance(value, Mapping):
        return inner
    if hasattr(value, "_fields"):
        return type(value)(*inner.values())
    return tuple(inner.values())


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Of a dict, a tuple or a list; of anything else none."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)


def _outline(value: Any) -> str:
    """What the user gave, without what is in it."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _check_rows(rows: Rows, items: int) -> None:
    for tree, argument in zip(rows, ("x", "y"), strict=True):
        if tree is None:
            continue
        for name, leaf in batching.named(tree, argument):
            if len(leaf) != items:
                raise DataError(
                    f"collate_fn must return one row for each item, got {len(leaf)} "
                    f"rows of {name} for {items} items; leave bad items out in the "
                    "dataset, and keep the items along the first axis"
                )
