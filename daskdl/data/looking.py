"""What has to be known of data before anybody trains on them, and is not."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from distributed import Client

from daskdl.data import trees
from daskdl.data.faults import (
    UNREADABLE,
    file_count,
    is_left_out,
    joined_files,
    readable_files,
)
from daskdl.data.passes import each_part
from daskdl.data.source import Facts, Source, facts_of, is_known
from daskdl.data.trees import Rows
from daskdl.errors import DataError

logger = logging.getLogger(__name__)


def looked_at(
    source: Source, client: Client | Literal[False], *, skips: bool = False
) -> Source:
    """The same source, with the rows of each part known; once, and the log says so.

    Args:
        source: Any.
        client: Synchronous: its workers look; False: this process does.
        skips: Whether a part that cannot be read has no rows, instead of an error.

    Raises:
        DataError: If there are no rows at all. What loading raises comes out.
    """
    if is_known(source):
        return source
    logger.info("the rows of %s parts are counted, once", source.parts)
    look = _Skipping(skips)
    seen: dict[int, _Seen] = dict(each_part(source, look, client))
    bad = sorted(part for part, one in seen.items() if one.facts.first[0] is None)
    if bad:
        logger.warning("%s parts cannot be read and are left out: %s", len(bad), bad)
    in_order = [seen[part].facts for part in sorted(seen)]
    rows = sum(fact.rows for fact in in_order)
    if rows == 0:
        unread = f", of which {len(bad)} cannot be read" if bad else ""
        raise DataError(
            f"X must not be empty, got no rows in {source.parts} parts{unread}"
        )
    logger.info("there are %s rows in %s parts", rows, source.parts)
    known = source.known(in_order)
    known.left_out = sum(one.left_out for one in seen.values())
    if known.first is not None and source.first is None:
        known.first = _usual([fact.first for fact in in_order if fact.rows])
    return known


def _usual(firsts: Sequence[Rows]) -> Rows:
    """The first rows of those parts that are as most are, or of the very first."""
    ((usual, _),) = Counter(map(trees.kinds, firsts)).most_common(1)
    return next(rows for rows in firsts if trees.kinds(rows) == usual)


class _Seen(NamedTuple):
    """What was learnt of a part."""

    facts: Facts  # no rows at all, not even empty ones, if it cannot be read
    left_out: int  # examples


@dataclasses.dataclass(frozen=True)
class _Skipping:
    """Looks at a part, and leaves out what of it cannot be read, if that may be."""

    skips: bool

    def __call__(self, source: Source, part: int) -> _Seen:
        try:
            return _Seen(source.look(part), 0)
        except UNREADABLE as error:
            if not is_left_out(error, source.name(part), self.skips):
                raise
            rows, files = joined_files(readable_files(source, part))
            nothing: Any = None
            facts = Facts(0, (nothing, nothing)) if rows is None else facts_of(rows)
            return _Seen(facts, file_count(source, part) - files)
