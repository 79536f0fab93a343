"""What names the examples beside their row numbers: a column, a list, or a bag's own.

How they are taken off the data is in :mod:`daskdl.per_example.keyed`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import dask
import numpy as np
from dask.delayed import delayed
from distributed import Client
from typing_extensions import override

from daskdl.data.source import Source, rows_in
from daskdl.errors import DataError, OptionError


class Place(NamedTuple):
    """Where an example is."""

    part: int
    row: int
    number: int  # among the rows of all parts


class Keys(ABC):
    """One for each example."""

    def check(self, source: Source) -> None:  # noqa: B027 - most are seen to go along
        """Refuse data that these cannot be the keys of.

        Raises:
            DataError: If there are more or fewer of them than rows.
        """

    @abstractmethod
    def with_scores(self, scores: Any) -> Any:
        """What `score_examples` returns.

        Args:
            scores: Of all examples, as they would be returned without keys.
        """

    @abstractmethod
    def of(self, places: Sequence[Place], client: Client | Literal[False]) -> list[Any]:
        """The keys of some examples."""

    def check_count(self, rows: int) -> None:  # noqa: B027 - most are cut alike
        """Refuse another number of rows than there are keys.

        Args:
            rows: That have been gone through.

        Raises:
            DataError: With both numbers.
        """


class Listed(Keys):
    """In memory.

    Args:
        values: In the order of the examples.
        name: Of them together, or None.
    """

    def __init__(self, values: Sequence[Any], name: str | None = None) -> None:
        self._values = values
        self._name = name

    @override
    def check(self, source: Source) -> None:
        if source.sequential:
            raise OptionError(
                "key must be None for data that are gone through from the beginning: "
                "their rows come from several shards at a time, in no order"
            )
        rows = rows_in(source)
        if rows is not None:
            self.check_count(rows)

    @override
    def check_count(self, rows: int) -> None:
        if rows != len(self._values):
            raise DataError(
                f"key must have one value for each row, got {len(self._values)} for "
                f"{rows} rows"
            )

    @override
    def with_scores(self, scores: Any) -> Any:
        pandas = _pandas()
        self.check_count(len(scores))
        index = pandas.Index(list(self._values), name=self._name, tupleize_cols=False)
        return pandas.Series(np.asarray(scores), index=index, name="score")

    @override
    def of(self, places: Sequence[Place], client: Client | Literal[False]) -> list[Any]:
        return [self._values[place.number] for place in places]


class Lazy(Keys):
    """A column of a ``dask.dataframe``, a ``dask.array`` or a bag, cut as the data are.

    Args:
        values: That. Scores of a bag have their keys already.
    """

    def __init__(self, values: Any) -> None:
        self._values = values

    @override
    def with_scores(self, scores: Any) -> Any:
        import dask.dataframe

        pandas = _pandas()
        parts = [_parts(own) for own in (scores, self._values)]
        make = delayed(_series, pure=False)
        meta = self._values._meta
        name = getattr(meta, "name", None)
        index = pandas.Index([], dtype=meta.dtype, name=name)
        return dask.dataframe.from_delayed(
            [make(*pair, name) for pair in zip(*parts, strict=True)],
            meta=pandas.Series([], index, dtype=np.float64, name="score"),
            verify_meta=False,
        )

    @override
    def of(self, places: Sequence[Place], client: Client | Literal[False]) -> list[Any]:
        return _fetched(_parts(self._values), places, client)


def _fetched(
    parts: Sequence[Any], places: Sequence[Place], client: Client | Literal[False]
) -> list[Any]:
    """Keys of some rows; the parts that these are in are computed, once each."""
    rows: dict[int, list[int]] = {}
    for place in places:
        rows.setdefault(place.part, []).append(place.row)
    take = delayed(_take, pure=False)
    tasks = [take(parts[part], own) for part, own in rows.items()]
    if client is False:
        taken = dask.compute(*tasks, scheduler="synchronous")
    else:
        taken = client.gather(client.compute(tasks))
    found = {
        (part, row): value
        for (part, own), values in zip(rows.items(), taken, strict=True)
        for row, value in zip(own, values, strict=True)
    }
    return [found[place.part, place.row] for place in places]


def _parts(collection: Any) -> list[Any]:
    return list(np.ravel(collection.to_delayed()))


def _take(values: Any, rows: list[int]) -> list[Any]:
    """Keys of some rows of a part, as objects of Python where they are numbers."""
    values = values if hasattr(values, "tolist") else list(values)
    if max(rows) >= len(values):
        raise DataError(
            f"key has {len(values)} values in a part that had at least {max(rows) + 1} "
            "rows; it must be cut as the data are, and be the same each time"
        )
    if hasattr(values, "iloc"):
        return list(values.iloc[rows].tolist())
    if isinstance(values, np.ndarray):
        return list(values[rows].tolist())
    return [values[row] for row in rows]


def _series(scores: Any, keys: Any, name: Any) -> Any:
    pandas = _pandas()
    index = pandas.Index(keys, name=name, tupleize_cols=False)
    return pandas.Series(np.asarray(scores), index, name="score")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise OptionError(
            "scores by key are a pandas.Series; pip install daskdl[dataframe]"
        ) from error
    return pandas
