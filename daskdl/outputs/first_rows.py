"""Rows to rehearse with, of data that show none before they are computed.

Parts are looked at one after the other until one has rows: what is lazy is not gone
through as a whole for that.
"""

import copy
import dataclasses
from typing import Literal, TypeVar

from distributed import Client

from daskdl.data.batching import Rows
from daskdl.data.passes import each_part
from daskdl.data.source import Facts, Source
from daskdl.errors import DataError
from daskdl.outputs.examples import Examples, Reading
from daskdl.outputs.notes import Noted

S = TypeVar("S", bound=Source)


def with_first_rows(source: Source, client: Client | Literal[False]) -> Source:
    """The same source, with rows to rehearse with.

    Args:
        source: Of any kind; of `Examples` it is then known whether they have keys.
        client: Of the cluster that computes parts; False: this process does.

    Raises:
        DataError: If there are no rows at all. What loading raises comes out.
    """
    if isinstance(source, Examples):
        return _examples(source, client)
    if source.first is not None:
        return source
    for part in range(source.parts):
        for _, facts in each_part(source, _facts, client, parts=[part]):
            if facts.rows:
                return _showing(source, facts.first)
    raise _empty(source)


def _examples(source: Examples, client: Client | Literal[False]) -> Examples:
    look = _Look(source.reading)
    for part in range(source.parts):
        for _, (first, keyed) in each_part(source, look, client, parts=[part]):
            if first is not None:
                shown = _showing(source, first)
                shown.reading = dataclasses.replace(source.reading, keyed=keyed)
                return shown
    raise _empty(source)


@dataclasses.dataclass(frozen=True)
class _Look:
    """Looks at the first example of a part; picklable."""

    reading: Reading

    def __call__(self, source: Source, part: int) -> tuple[Rows | None, bool]:
        with Noted(f"in {source.name(part)}"):
            value, _ = source.load(part)
            return self.reading.first(value, part)


def _facts(source: Source, part: int) -> Facts:
    with Noted(f"in {source.name(part)}"):
        return source.look(part)


def _showing(source: S, first: Rows) -> S:
    other = copy.copy(source)
    other.first = first
    return other


def _empty(source: Source) -> DataError:
    return DataError(f"X must not be empty, got no rows in {source.parts} parts")
