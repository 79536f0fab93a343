"""What has to be known of data before anybody trains on them, and is not."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from distributed import Client

from daskdl.data import batching
from daskdl.data.batching import Kinds
from daskdl.data.faults import (
    UNREADABLE,
    is_left_out,
    joined_files,
    separated,
)
from daskdl.data.passes import each_part
from daskdl.data.source import Facts, Source, facts_of, is_known
from daskdl.errors import DataError

logger = logging.getLogger(__name__)

# Small parts are put together as long as so many are left, so that an epoch ends within
# 1/64 of the data of being even, and as long as one has no more rows and bytes.
# To train on so many takes some milliseconds, and to hold them little memory.
LEAST_PARTS = 64
TOGETHER_ROWS = 1024
TOGETHER_BYTES = 2**20


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
    firsts = [fact.first for fact in in_order if fact.rows]
    kinds = [batching.kinds(first) for first in firsts]
    ((usual, _),) = Counter(kinds).most_common(1)
    if known.first is not None and source.first is None:
        known.first = firsts[kinds.index(usual)]
    if len(set(kinds)) > 1:
        known.unlike = _of_parts(known, kinds)
    return known


def _of_parts(source: Source, kinds: Sequence[Kinds]) -> Sequence[Kinds]:
    """The same, with something for each part without rows."""
    following = iter(kinds)
    return [next(following) if rows else () for rows in source.lengths or ()]


class _Seen(NamedTuple):
    """What was learnt of a part."""

    facts: Facts  # no rows at all, not even empty ones, if it cannot be read
    left_out: int  # examples


def small_together(source: Source) -> Source:
    """The same rows, with small parts put together with those that come after them.

    To lease a part, to ask for it and to compute it takes a millisecond or so, whatever
    it has. How parts are put together does not depend on who trains on them.

    Args:
        source: Of which enough is known.
    """
    lengths, first = source.lengths, source.first
    if not source.given or lengths is None or first is None:
        return source
    row_bytes = max(batching.nbytes(first) // batching.length(first[0]), 1)
    most = min(sum(lengths) // LEAST_PARTS, TOGETHER_ROWS, TOGETHER_BYTES // row_bytes)
    groups: list[list[int]] = []
    rows, kinds = most, None
    for part, own in enumerate(lengths):
        unlike = None if source.unlike is None else source.unlike[part]
        if own == 0:
            continue
        if rows + own > most or unlike != kinds:
            groups.append([])
            rows, kinds = 0, unlike
        groups[-1].append(part)
        rows += own
    if len(groups) == sum(own > 0 for own in lengths):
        return source
    logger.info("%s parts are put together to %s", source.parts, len(groups))
    return source.together(groups)


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
            separate = source.separate(part)
            rows, files = joined_files(separated(separate, skips=True))
            nothing: Any = None
            facts = Facts(0, (nothing, nothing)) if rows is None else facts_of(rows)
            return _Seen(facts, max(len(separate), 1) - files)
