"""The pass in which the statistics of x are gathered from all parts.

Each part is reduced to a few numbers where it is. These are merged in the order of the
parts, so that the result is the same whichever comes first.
"""

import contextlib
import functools
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar, cast

import numpy as np

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.normalising.normalisation import alike
from daskdl.data.normalising.statistics import Per, Statistics, statistics_of
from daskdl.data.passes import each_part
from daskdl.data.source import STREAMED_ROWS, Source, rows_of_part
from daskdl.errors import DataError, OptionError

T = TypeVar("T")
Keys = tuple[str | int, ...]


def statistics_of_all(
    source: Source,
    per: Per,
    only: Keys | None,
    client: Any,
) -> Tree:
    """Go through all parts once.

    Args:
        source: What x is taken of.
        per: As of `statistics_of`.
        only: Keys of the outermost dict or tuple of x; None: all of it.
        client: As of `each_part`.

    Returns:
        A tree like x: statistics of each array, None where it is left out.

    Raises:
        DataError: Naming the part and the array if a value is NaN or infinite, if
            parts do not fit together, or if there is no row at all.
        OptionError: If x has no such key.
    """
    function = functools.partial(_of_part, per=per, only=only)
    results = cast(
        "Generator[tuple[int, Tree | None]]", each_part(source, function, client)
    )
    total = None
    # Closed at once, not when the traceback of an error is forgotten.
    with contextlib.closing(results):
        for part, found in _in_order(results):
            if found is not None:
                total = found if total is None else _merged(total, found, source, part)
    if total is None:
        raise DataError("X has no rows to fit a normaliser on")
    return total


def _of_part(source: Source, part: int, per: Per, only: Keys | None) -> Tree | None:
    """What is done where the part is; None if it has no rows."""
    total, start = None, 0
    for x, _ in rows_of_part(source, part, STREAMED_ROWS):
        found = _of_rows(source, part, x, per, only, start)
        if found is not None:
            total = found if total is None else _merged(total, found, source, part)
        start += batching.length(x)
    return total


def _of_rows(
    source: Source, part: int, x: Tree, per: Per, only: Keys | None, start: int
) -> Tree | None:
    if not batching.length(x):
        return None

    def found(leaf: np.ndarray, name: str | None) -> Statistics | None:
        if name is None:
            return None
        try:
            return statistics_of(leaf, per)
        except DataError as error:
            beginning = f", its rows counted from {start}" if start else ""
            raise DataError(
                f"{source.name(part)}{beginning}: {name}{error}; a normaliser needs "
                "finite numbers, remove such rows or fill them in"
            ) from error

    return batching.mapped(found, x, _names(x, only))


def _names(x: Tree, only: Keys | None) -> Tree:
    """A tree like x: the name of each array, None if it is left out."""
    names = [name for name, _ in batching.named(x, "x")]
    if only is not None:
        for key in only:
            if not any(name.startswith(f"x[{key!r}]") for name in names):
                raise OptionError(
                    f"only must hold keys of x, got {key!r} for x like "
                    f"{batching.outline(x)}"
                )
    starts = ("x",) if only is None else tuple(f"x[{key!r}]" for key in only)
    shown = iter(name if name.startswith(starts) else None for name in names)
    return batching.mapped(lambda _: next(shown), x)


def _merged(total: Tree, found: Tree, source: Source, part: int) -> Tree:
    def merged(one: Statistics | None, two: Statistics | None) -> Any:
        if one is None or two is None:
            return None
        if one.mean.shape != two.mean.shape:
            raise DataError(
                f"{source.name(part)} has rows of shape {two.mean.shape}, those before "
                f"have {one.mean.shape}; use per='channel' for images of several sizes"
            )
        return one.merged(two)

    if not alike(total, found):
        raise DataError(
            f"x of {source.name(part)} is like {batching.outline(found)}, "
            f"those before are like {batching.outline(total)}"
        )
    return batching.mapped(merged, total, found)


def _in_order(results: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
    """By part; what comes early waits."""
    waiting: dict[int, T] = {}
    following = 0
    for part, result in results:
        waiting[part] = result
        while following in waiting:
            yield following, waiting.pop(following)
            following += 1
