"""A folder of checkpoints, numbered as they come: the newest whole one is what counts.

Each has a folder of its own inside, named after its number. Numbers are never used
again, so that what was left of one that was broken off is never taken for another's.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from daskdl.checkpoints.parts import COMMON, Part, Stamp, of_replica
from daskdl.checkpoints.retention import Entry, Retention
from daskdl.data.stores.listing import is_path
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError, OptionError, SaveError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d{6,})")


class Whole(NamedTuple):
    """A checkpoint all of which is there."""

    store: Store
    stamp: Stamp
    said: dict[str, Any]  # what its common part says without the tensors

    @property
    def members(self) -> list[int]:
        """The replicas whose parts it has, ascending."""
        members: list[int] = self.said["members"]
        return members


@dataclass(frozen=True)
class Series:
    """Checkpoints in one folder.

    Attributes:
        store: The folder.
    """

    store: Store

    @classmethod
    def at(cls, url: Any) -> "Series":
        """The series at a URL or a path.

        Raises:
            OptionError: If it is neither.
        """
        if not is_path(url):
            raise OptionError(f"url must be a URL or a path of a folder, got {url!r}")
        return cls(store_of(url))

    def folder(self, number: int) -> Store:
        """The folder of one.

        Example:
            >>> Series.at("memory://x").folder(12).url
            'memory://x/checkpoint-000012'
        """
        url = self.store.url_of(f"checkpoint-{number:06d}")
        return replace(self.store, url=url)

    def numbers(self) -> list[int]:
        """Of all that are there, whole or not, ascending.

        Raises:
            SaveError: If the folder cannot be listed.
        """
        try:
            found = map(_NAME.fullmatch, self.store.folders())
            return sorted(int(match[1]) for match in found if match)
        except DataError as error:
            raise SaveError(f"cannot list {self.store.url}: {error}") from error

    def whole(self, number: int) -> Whole | None:
        """One of them; None if not all of it is there.

        Raises:
            SaveError: If it is there, and damaged or too new.
        """
        return whole_at(self.folder(number))

    def newest(self) -> Whole | None:
        """The newest whole one, or None.

        Raises:
            SaveError: If it is damaged or too new. An older one is not taken in its
                place; its own URL can be given.
        """
        for number in reversed(self.numbers()):
            found = self.whole(number)
            if found is not None:
                return found
        return None

    def prune(
        self, origin: str, retention: Retention, score: Callable[[Whole], float]
    ) -> None:
        """Delete what is not to be kept: of one fit, and what was broken off before.

        Args:
            origin: Of the fit; whole ones of others stay.
            retention: What is to be kept.
            score: Of one.
        """
        own: dict[int, Whole] = {}
        broken_off: list[int] = []
        for number in self.numbers():
            try:
                found = self.whole(number)
            except SaveError as error:  # somebody may want to look at it
                logger.warning("%s is left where it is", error)
                continue
            if found is None:
                broken_off.append(number)
            elif found.stamp.origin == origin:
                own[number] = found
        entries = [Entry(n, one.said["count"], score(one)) for n, one in own.items()]
        kept = retention.kept(entries)
        stale = [number for number in broken_off if number < max(own, default=0)]
        for number in (*stale, *(own.keys() - kept)):
            self._delete(number)

    def _delete(self, number: int) -> None:
        store = self.folder(number)
        try:
            store.delete([f"{COMMON}.json"])  # first: from now on it is not whole
            store.delete_all()
        except DataError as error:
            raise SaveError(f"cannot delete {store.url}: {error}") from error


def whole_at(store: Store) -> Whole | None:
    """The checkpoint in a folder; None if not all of it is there.

    Raises:
        SaveError: If it is there, and damaged or too new.
    """
    common = Part(store, COMMON)
    try:
        if not store.exists(common.index):
            return None
        stamp, said = common.said()
        _check_said(store, said)
        for replica in said["members"]:
            part = Part(store, of_replica(replica))
            if not store.exists(part.index) or part.said()[0] != stamp:
                return None
    except DataError as error:
        raise SaveError(f"cannot read {store.url}: {error}") from error
    return Whole(store, stamp, said)


def _check_said(store: Store, said: Mapping[str, Any]) -> None:
    members, count, rows = said.get("members"), said.get("count"), said.get("rows")
    whole = isinstance(members, list) and all(type(m) is int for m in members)
    # Their names are those of files.
    if not (whole and members and sorted(set(members)) == members and members[0] >= 0):
        raise SaveError(f"{store.url} is damaged: its replicas are {members!r:.80}")
    if type(count) is not int or count < 1:
        raise SaveError(f"{store.url} is damaged: it is number {count!r:.80}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SaveError(f"{store.url} is damaged: its history is {rows!r:.80}")
