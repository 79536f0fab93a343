"""Parts that Dask's tasks make: what all kinds of collections have in common.

Lazy or persisted, or lazy on top of what is persisted.
"""

import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from dask.delayed import Delayed
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.arrays import (
    as_numpy,
    check_dtype,
    check_kind,
    is_dask_array,
)
from daskdl.data.batching import Rows
from daskdl.data.frames.columns import columns_of, is_frame
from daskdl.data.graphs import Tasks, is_future
from daskdl.data.part_graph import Joined, Member, PartGraph
from daskdl.data.source import Facts, Source
from daskdl.errors import DataError


def is_dask_frame(value: Any) -> bool:
    """Whether it is a ``dask.dataframe`` or a column of one; Dask is not imported."""
    module = sys.modules.get("dask.dataframe")
    return module is not None and isinstance(value, module.DataFrame | module.Series)


def is_bag(value: Any) -> bool:
    """Whether it is a ``dask.bag``; Dask is not imported."""
    module = sys.modules.get("dask.bag")
    return module is not None and isinstance(value, module.Bag)


def is_lazy_list(value: Any) -> bool:
    """Whether it is a list of Delayed objects and futures."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, Delayed) or is_future(part) for part in value)
    )


def is_lazy(value: Any) -> bool:
    """Whether what a model makes of it is lazy: it is a collection, or of such."""
    if is_bag(value) or is_lazy_list(value):
        return True
    leaves = batching.leaves(value) if isinstance(value, tuple | dict) else [value]
    return any(is_dask_array(leaf) or is_dask_frame(leaf) for leaf in leaves)


class Finish(ABC):
    """Makes rows of the values that tasks have computed for a part; picklable."""

    @abstractmethod
    def __call__(self, values: list[Any], part: int) -> Rows:
        """Make rows, and refuse what cannot be used.

        Args:
            values: Of the keys of the part.
            part: Its number, for messages.
        """


class Collections(Source):
    """Parts that tasks make.

    Args:
        tasks: Of all parts.
        keys: For each part, of the values that it is made of.
        finish: Makes rows of these.
        lengths: Rows of each part, if known.
        first: Rows like all others, if known.

    Attributes:
        finish: Likewise.
    """

    finish: Finish
    apart = True
    given = True

    def __init__(
        self,
        tasks: Tasks,
        keys: Sequence[tuple[Any, ...]],
        finish: Finish,
        lengths: Sequence[int] | None = None,
        first: Rows | None = None,
    ) -> None:
        self.parts = len(keys)
        self.lengths = lengths
        self.first = first
        self._tasks = tasks
        self._keys = keys
        self.finish = finish
        self._graphs: dict[int, PartGraph] = {}
        self._seen: Sequence[int] | None = None  # rows of each key, when looked at
        self._groups: Sequence[Sequence[int]] = [[part] for part in range(len(keys))]

    @override
    def packed(self, part: int) -> PartGraph:
        if part not in self._graphs:
            members = [self._member(own) for own in self._groups[part]]
            keys = [key for own in self._groups[part] for key in self._keys[own]]
            finish: Any = Joined(members) if len(members) > 1 else members[0].finish
            self._graphs[part] = self._tasks.part(keys, finish, self.name(part))
        return self._graphs[part]

    def _member(self, part: int) -> Member:
        finish: Any = functools.partial(self.finish, part=part)
        if self._seen is not None:
            finish = _AsSeen(finish, part, self._seen[part])
        return Member(f"part {part}", len(self._keys[part]), finish)

    @override
    def together(self, groups: Sequence[Sequence[int]]) -> Self:
        assert self.lengths is not None, "small parts are known ones"
        fewer = copy.copy(self)
        fewer.parts = len(groups)
        fewer.lengths = [sum(self.lengths[own] for own in group) for group in groups]
        fewer._groups, fewer._graphs = groups, {}
        return fewer

    @override
    def separate(self, part: int) -> Sequence[tuple[str, Callable[[], Rows]]]:
        graph = self.packed(part)
        return graph.separate({key: self._tasks.result(key) for key in graph.needs})

    @override
    def name(self, part: int) -> str:
        first, *others = self._groups[part]
        return f"parts {first} to {others[-1]}" if others else f"part {first}"

    @override
    def needs(self, part: int) -> tuple[Any, ...]:
        return self.packed(part).needs

    @override
    def load(self, part: int) -> Rows:
        graph = self.packed(part)
        return graph.rows({key: self._tasks.result(key) for key in graph.needs})

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        whole = copy.copy(self)
        whole.lengths = whole._seen = [fact.rows for fact in facts]
        whole._graphs = {}
        if self.first is None:  # labels of one part may be floats, if some are missing
            whole.first = next((fact.first for fact in facts if fact.rows), None)
        return whole


@dataclass(frozen=True)
class _AsSeen:
    """Refuses a part that is not the same each time it is computed.

    Attributes:
        finish: Makes rows of values.
        part: Its number.
        rows: How many it had when it was looked at.
    """

    finish: Callable[[list[Any]], Rows]
    part: int
    rows: int

    def __call__(self, values: list[Any]) -> Rows:
        made = self.finish(values)
        if batching.length(made[0]) != self.rows:
            raise DataError(
                f"part {self.part} has {batching.length(made[0])} rows, and had "
                f"{self.rows} when it was computed before; it must be the same each "
                "time: persist() it, or export it"
            )
        return made


def plain(
    value: Any, name: str, classes: Sequence[str] | None = None, label: bool = False
) -> np.ndarray:
    """One array of a part, as numpy, whatever tasks made of it.

    Args:
        value: An array, a tensor, or a table.
        name: For messages.
        classes: Of a table of labels: names that become their numbers.
        label: Whether it holds labels, of which some may be missing.

    Raises:
        DataError: If it is none of these, or cannot be used.
    """
    if is_frame(value):
        return columns_of(value, name, classes, label)
    check_kind(value, name)
    if value.ndim == 0:
        raise DataError(
            f"{name} must have examples along its first axis, got one value"
        )
    check_dtype(value, name)
    return as_numpy(value)


def checked(rows: Rows, part: int, promised: int | None) -> Rows:
    """Refuse rows that are not as many as they should be.

    Args:
        rows: Of a part.
        part: Its number, for messages.
        promised: How many there should be, or None.
    """
    lengths = {name: len(leaf) for name, leaf in batching.named_both(rows).items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise DataError(
            f"part {part} has rows that do not go together: {shown}; partition X and y "
            "alike"
        )
    found = batching.length(rows[0])
    if promised is not None and found != promised:
        raise DataError(
            f"part {part} has {found} rows, but the chunks promise "
            f"{promised}; call compute_chunk_sizes()"
        )
    return rows
