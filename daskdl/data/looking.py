"""What has to be known of data before anybody trains on them, and is not."""

import dataclasses
import logging
from typing import Any, Literal

from distributed import Client

from daskdl.data.faults import UNREADABLE, is_left_out
from daskdl.data.passes import each_part
from daskdl.data.source import Facts, Source, is_known
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
    facts: dict[int, Facts] = dict(each_part(source, look, client))
    bad = [part for part, fact in facts.items() if fact.rows < 0]
    if bad:
        logger.warning("%s parts cannot be read and are left out: %s", len(bad), bad)
    in_order = [
        facts[part]._replace(rows=max(facts[part].rows, 0)) for part in sorted(facts)
    ]
    rows = sum(fact.rows for fact in in_order)
    if rows == 0:
        unread = f", of which {len(bad)} cannot be read" if bad else ""
        raise DataError(
            f"X must not be empty, got no rows in {source.parts} parts{unread}"
        )
    logger.info("there are %s rows in %s parts", rows, source.parts)
    return source.known(in_order)


@dataclasses.dataclass(frozen=True)
class _Skipping:
    """Looks at a part; -1 rows if it cannot be read and may be left out."""

    skips: bool

    def __call__(self, source: Source, part: int) -> Facts:
        try:
            return source.look(part)
        except UNREADABLE as error:
            if not is_left_out(error, source.name(part), self.skips):
                raise
            nothing: Any = None
            return Facts(-1, (nothing, nothing))
