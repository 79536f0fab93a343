"""Predictions written by the workers that make them, part by part.

A part is made by one task, which writes its file and returns what is known of it: no
output goes through the client. The manifest comes last, see
:mod:`daskdl.predictions.manifest`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dask
from dask.delayed import Delayed, delayed
from distributed import Client, as_completed

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.collections import Collections
from daskdl.data.exports.schema import outline_of
from daskdl.data.futures import release
from daskdl.data.passes import each_part
from daskdl.data.source import Source
from daskdl.errors import ModelError
from daskdl.lazy_outputs import lazy_outputs, lazy_parts
from daskdl.outputs import examples
from daskdl.outputs.examples import Ask
from daskdl.outputs.tables import tables_of
from daskdl.predictions.arrays import Arrays
from daskdl.predictions.base import Format
from daskdl.predictions.examples import Examples
from daskdl.predictions.part_file import PartFile
from daskdl.predictions.predictions import Predictions
from daskdl.predictions.tables import Tables
from daskdl.predictions.target import Target


@dataclass(frozen=True)
class LazyBlocks:
    """What is asked about a collection, to be written.

    Attributes:
        X: The collection.
        source: The same, as it is cut.
        ask: What comes out for rows.
        empty: The outputs of no rows.
        names: For the columns of a table, if there are as many.
    """

    X: Any
    source: Collections
    ask: Ask
    empty: Tree
    names: Sequence[Any] | None

    def blocks(
        self, client: Client | Literal[False]
    ) -> tuple[Format, Sequence[Delayed]]:
        """How the partitions are written, and what comes out for each."""
        if isinstance(self.source, examples.Examples):
            kind, values = lazy_parts(self.X, self.source, self.ask, client)
            keyed = bool(self.source.reading.keyed)
            collection: Literal["bag", "list"] = "bag" if kind == "bag" else "list"
            return Examples(outline_of(self.empty), keyed, collection), values
        first = batching.leaves(self.X)[0]
        if not hasattr(first, "divisions"):
            kind, values = lazy_parts(self.X, self.source, self.ask, client)
            return Arrays.of(self.empty), values
        if not isinstance(tables_of(self.empty, self.names), list):
            raise ModelError(
                "outputs must make one table to be written for a dask.dataframe, got "
                f"{batching.outline(self.empty)}; give a postprocess that returns a "
                "dict of outputs with one number for each row"
            )
        made = lazy_outputs(
            self.X, self.source, self.ask, self.empty, client, names=self.names
        )
        return Tables.of(made), made.to_delayed()


def write_lazy(
    asked: LazyBlocks, target: Target, client: Client | Literal[False]
) -> Predictions:
    """Write what comes out for a collection, or go on where that was interrupted.

    Args:
        asked: What is asked about it.
        target: Where to.
        client: Of the cluster that computes; False: this process does.
    """
    form, blocks = asked.blocks(client)
    files = target.begin()
    write = delayed(_write, pure=False)
    writes = {
        part: write(target, form, part, block)
        for part, block in enumerate(blocks)
        if part not in files
    }
    files |= dict(_computed(writes, client))
    return target.finish(form, files)


def write_parts(
    source: Source,
    ask: Callable[[Source, int], Tree],
    empty: Tree,
    target: Target,
    client: Client | Literal[False],
) -> Predictions:
    """Write what comes out for what is no collection, likewise.

    Args:
        source: The parts.
        ask: What comes out for one.
        empty: The outputs of no rows.
        target: Where to.
        client: As of `write_lazy`.
    """
    form = Arrays.of(empty)
    files = target.begin()
    missing = [part for part in range(source.parts) if part not in files]
    write = _Writing(ask, target, form)
    if missing:
        files |= dict(each_part(source, write, client, parts=missing, send=True))
    return target.finish(form, files)


@dataclass(frozen=True)
class _Writing:
    """Writes what comes out for a part; picklable."""

    ask: Callable[[Source, int], Tree]
    target: Target
    form: Format

    def __call__(self, source: Source, part: int) -> PartFile:
        outputs = batching.leaves(self.ask(source, part))
        return self.target.write(self.form, part, outputs)


def _write(target: Target, form: Format, part: int, value: Any) -> PartFile:
    """The task of a partition."""
    return target.write(form, part, value)


def _computed(
    writes: Mapping[int, Delayed], client: Client | Literal[False]
) -> Iterator[tuple[int, PartFile]]:
    if client is False:
        done = dask.compute(*writes.values(), scheduler="sync")
        yield from zip(writes, done, strict=True)
        return
    futures = client.compute(list(writes.values()))
    parts = dict(zip(futures, writes, strict=True))
    try:
        for future in as_completed(futures, loop=client.loop):
            yield parts[future], future.result()
    finally:
        release(futures)
