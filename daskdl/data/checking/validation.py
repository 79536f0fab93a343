"""The pass over all parts that says what is wrong with them."""

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from daskdl.data.checking.expectations import expectations_of
from daskdl.data.checking.files import OfFiles
from daskdl.data.checking.findings import Findings, findings_of
from daskdl.data.checking.quarantine import Quarantine
from daskdl.data.checking.report import KINDS, SHOWN, Moved, Offender, Report
from daskdl.data.in_memory import InMemory
from daskdl.data.options import SourceOptions
from daskdl.data.passes import each_part
from daskdl.data.source import Source
from daskdl.data.sources import source_of


def validate(
    source: Any,
    *,
    y: Any = None,
    shapes: Any = None,
    dtypes: Any = None,
    labels: Any = None,
    loader: Callable[..., Any] | None = None,
    quarantine: str | os.PathLike[str] | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Load all data once, each part where it is, and say what is wrong with them.

    Nothing is changed, and nothing is deleted. With `quarantine`, files that something
    is wrong with are moved; look at the report first, since a wrong expectation would
    move all of them.

    Args:
        source: Whatever `Trainer.fit` takes as X.
        y: Likewise.
        shapes: Of a row of each array, None or -1 for any length: ``(3, None, None)``
            for x; ``{"image": (3, 32, 32), "size": (2,)}`` for an x of this structure;
            ``{"x": (3, 32, 32), "y": ()}`` for both.
        dtypes: Likewise.
        labels: A number n of classes, 0 to n - 1; a range; or a set of numbers. For
            several outputs a tree like y.
        loader: As of `Trainer.fit`, for paths. If it raises, the part is unreadable.
        quarantine: A folder outside of the data, on any fsspec URL.
        client: None: the default client, if there is one. False: no cluster.
        storage_options: As fsspec's, of the file systems of paths and of quarantine.

    Returns:
        Counts and the first offenders; labels are missing where they are NaN, and
        where there are none although something is expected of them.

    Raises:
        OptionError: If an argument cannot be used, or quarantine is given for data
            that are not files.

    Example:
        >>> import numpy as np
        >>> X, y = np.array([[1.0], [np.nan]]), np.array([0, 2])
        >>> print(validate(X, y=y, labels=2, client=False))
        1 part, 2 rows
        missing        0 parts
        unreadable     0 parts
        wrong shape    0 parts
        wrong dtype    0 parts
        missing label  0 rows
        invalid label  1 row
        non-finite     1 row
        <BLANKLINE>
        part    row  kind           message
        part 0  1    invalid label  y is 2, allowed are 0 to 1
        part 0  1    non-finite     x is nan
    """
    expectations = expectations_of(shapes, dtypes, labels)
    options = dict(storage_options or {})
    given = SourceOptions(
        loader=loader,
        labelled=False,  # missing labels are counted
        storage_options=storage_options,
    )
    chosen = _whole(source_of(source, y, given))
    away = None if quarantine is None else Quarantine.of(quarantine, chosen, options)
    function = functools.partial(findings_of, expectations=expectations)
    totals = _Totals()
    for part, found in each_part(chosen, function, client):
        totals.add(part, found)
    moved = [] if away is None else _moved(away, chosen, totals.wrong_files, client)
    return totals.report(chosen, moved)


def _whole(source: Source) -> Source:
    """What is in memory as one part: its rows have the numbers that the user knows."""
    if isinstance(source, InMemory):
        return InMemory(*source.whole, batch_size=sum(source.lengths))
    return source


class _Totals:
    """What has been found so far, whatever the order the parts come in."""

    def __init__(self) -> None:
        self.rows = 0
        self.files = 0
        self.counts = Counter[str]()
        self.wrong_files: dict[int, list[int]] = {}
        self._first: list[tuple[int, int, Offender]] = []  # by part and place in it

    def add(self, part: int, found: Findings) -> None:
        """Add a part."""
        self.rows += found.rows
        self.files += found.files
        self.counts += found.counts
        if found.wrong_files:
            self.wrong_files[part] = found.wrong_files
        if found.offenders:
            self._first += [(part, i, one) for i, one in enumerate(found.offenders)]
            self._first = sorted(self._first)[:SHOWN]

    def report(self, source: Source, moved: list[Moved]) -> Report:
        """All of it."""
        return Report(
            source.parts,
            self.files if isinstance(source, OfFiles) else None,
            self.rows,
            {kind: self.counts[kind] for kind in KINDS},
            tuple(one for _, _, one in self._first),
            tuple(moved),
        )


def _moved(
    quarantine: Quarantine,
    source: Source,
    files: Mapping[int, list[int]],
    client: Any,
) -> list[Moved]:
    """Move files, where their parts are; what became of each, in order."""
    if not files:
        return []
    function = functools.partial(quarantine.take, files=files)
    results = dict(each_part(source, function, client, parts=sorted(files)))
    return [move for part in sorted(results) for move in results[part]]
