"""Checkpoints in storage: a series of folders, the parts in each, and pruning.

A checkpoint is complete when all of its parts have the same stamp; incomplete ones are
never resumed.
"""

import logging
import math
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from daskdl.callbacks import Checkpoint, largest_is_best
from daskdl.channel.protocol import Natural, Positive, check
from daskdl.data.manifest import ManifestFormat
from daskdl.data.storage import Store
from daskdl.errors import DataError, SaveError
from daskdl.saving.folder import SaveFolder, encode_tensors, folder_store, save_errors
from daskdl.saving.json_values import JsonValues

logger = logging.getLogger(__name__)

COMMON = "common"


class CheckpointStamp(NamedTuple):
    """Identity of a checkpoint; all parts of a checkpoint have the same stamp."""

    origin: str  # identity of the original fit; unchanged by resuming
    run: str  # identity of the run that wrote the checkpoint
    number: int  # number in the series


def of_replica(replica: int) -> str:
    """Return the name of a replica's part."""
    return f"replica-{replica}"


class Copy(NamedTuple):
    """A copy of a part in memory, ready to be written."""

    content: dict[str, Any]  # JSON values
    tensors: Tensor | None  # bytes of the safetensors file; None without tensors


_CONTENT = {
    "stamp": CheckpointStamp,
    "header": Mapping[str, Any],
    "state": Mapping[str, Any],
}


@dataclass(frozen=True)
class Part:
    """One part of a checkpoint: a manifest and a file of tensors."""

    store: Store
    name: str

    @property
    def index(self) -> str:
        """File name of the manifest, which is written last."""
        return f"{self.name}.json"

    @property
    def _folder(self) -> SaveFolder:
        hint, remedy = "give the URL of checkpoints", "resume an older checkpoint"
        kind = ManifestFormat("daskdl checkpoint", 1, self.index, hint, remedy)
        return SaveFolder(self.store, kind, (self.name,))

    def copied(
        self,
        stamp: CheckpointStamp,
        header: Mapping[str, Any],
        state: Mapping[str, Any],
        used: Copy | None = None,
    ) -> Copy:
        """Copy header and state, so that training can continue.

        The header has plain values, can be read without the state, and shares no names
        with it. The memory of `used`, a written copy, may be reused.
        """
        values = JsonValues()
        content = {
            "stamp": list(stamp),
            "header": values.encode(dict(header), "header"),
            "state": values.encode(dict(state), "state"),
        }
        reused = None if used is None else used.tensors
        tensors = encode_tensors(values.tensors, reused) if values.tensors else None
        return Copy(content, tensors)

    def write(self, copy: Copy) -> None:
        """Write the part atomically; a SaveError names the folder."""
        files = {} if copy.tensors is None else {self.name: copy.tensors}
        self._folder.write(copy.content, files)

    def header(self) -> tuple[CheckpointStamp, dict[str, Any]]:
        """Read the header, without loading tensors; errors as :meth:`read`."""
        return self._decoded(self._folder.content(), None)

    def read(self) -> tuple[CheckpointStamp, dict[str, Any]]:
        """Read header and state, merged into one mapping.

        Raises:
            SaveError: If the part is missing, damaged or too new.
        """
        content, tensors = self._folder.read()
        return self._decoded(content, tensors.get(self.name, {}))

    def _decoded(
        self, content: Any, tensors: dict[str, Tensor] | None
    ) -> tuple[CheckpointStamp, dict[str, Any]]:
        """Decode the header; with tensors, decode the state, too."""
        names = ("header",) if tensors is None else ("header", "state")
        values = JsonValues(tensors or {})
        try:
            parts = {name: values.decode(content[name]) for name in names}
            check({"stamp": content["stamp"], **parts}, _CONTENT)
        except (TypeError, LookupError, SaveError) as error:
            where = self.store.url_of(self.index)
            raise SaveError(f"{where} is damaged: {error}") from error
        return CheckpointStamp(*content["stamp"]), dict(ChainMap(*parts.values()))


_NAME = re.compile(r"checkpoint-(\d{6,})")


class CompleteCheckpoint(NamedTuple):
    """A complete checkpoint."""

    store: Store
    stamp: CheckpointStamp
    header: dict[str, Any]  # header of the common part; `members` have a part each


@dataclass(frozen=True)
class Series:
    """The checkpoints in one folder."""

    store: Store

    @classmethod
    def at(cls, url: Any, storage_options: Mapping[str, Any] | None = None) -> "Series":
        """Return the series at a URL or a path; an OptionError if it is neither."""
        return cls(folder_store(url, storage_options))

    def folder(self, number: int) -> Store:
        """Return the folder of a checkpoint."""
        url = self.store.url_of(f"checkpoint-{number:06d}")
        return replace(self.store, url=url)

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, complete or not, ascending."""
        with save_errors("list", self.store):
            matches = map(_NAME.fullmatch, self.store.folders())
            return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> CompleteCheckpoint | None:
        """Return the newest complete checkpoint, or None.

        Raises:
            SaveError: If the newest checkpoint is damaged or too new. The search stops
                there; the user can give the URL of an older checkpoint.
        """
        for number in reversed(self.numbers()):
            checkpoint = complete_at(self.folder(number))
            if checkpoint is not None:
                return checkpoint
        return None

    def delete(self, number: int) -> None:
        """Delete a checkpoint."""
        store = self.folder(number)
        with save_errors("delete", store):
            store.delete([f"{COMMON}.json"])  # makes the checkpoint incomplete
            store.delete_all()


# `ResumePlan` checks the other fields. Members become file names.
_HEADER = {
    "members": Sequence[Natural],
    "count": Positive,
    "rows": Sequence[Mapping[str, Any]],
}


def complete_at(store: Store) -> CompleteCheckpoint | None:
    """Return the checkpoint in a folder; None if it is incomplete."""
    common = Part(store, COMMON)
    try:
        if not store.exists(common.index):
            return None
        stamp, header = common.header()
        check({name: header[name] for name in _HEADER}, _HEADER)
        members = header["members"]
        if not members or sorted({*members}) != members:
            raise SaveError(f"{store.url} is damaged: its replicas are {members!r:.80}")
        for replica in members:
            part = Part(store, of_replica(replica))
            if not store.exists(part.index) or part.header()[0] != stamp:
                return None
    except DataError as error:
        raise SaveError(f"cannot read {store.url}: {error}") from error
    except (TypeError, LookupError) as error:
        raise SaveError(f"{store.url} is damaged: {error}") from error
    return CompleteCheckpoint(store, stamp, header)


@dataclass(frozen=True)
class CheckpointPlan:
    """The plan by which one run writes checkpoints, identical for all replicas."""

    series: Series  # the folder of all checkpoints
    rule: Checkpoint  # the user's callback
    origin: str  # see `CheckpointStamp`
    run: str
    first_number: int  # of the first checkpoint of the run
    before: int = 0  # checkpoints of the fit before this run

    def stamp(self, taken: int) -> CheckpointStamp:
        """Return the stamp of the next checkpoint."""
        return CheckpointStamp(self.origin, self.run, self.first_number + taken)

    def newest(self) -> CompleteCheckpoint | None:
        """Return the newest checkpoint of the fit; None if there is none."""
        newest = self.series.newest()
        return newest if newest and newest.stamp.origin == self.origin else None

    def prune(self) -> None:
        """Delete checkpoints of the fit that are not kept, and older incomplete ones.

        Complete checkpoints of other fits stay, as do damaged checkpoints.
        """
        series, of_fit, incomplete = self.series, dict[int, CompleteCheckpoint](), []
        for number in series.numbers():
            try:
                checkpoint = complete_at(series.folder(number))
            except SaveError as error:  # the user may want to inspect it
                logger.warning("a damaged checkpoint is not deleted: %s", error)
                continue
            if checkpoint is None:
                incomplete.append(number)
            elif checkpoint.stamp.origin == self.origin:
                of_fit[number] = checkpoint
        stale = [number for number in incomplete if number < max(of_fit, default=0)]
        for number in (*stale, *(of_fit.keys() - self._kept(of_fit))):
            series.delete(number)

    def _kept(self, of_fit: Mapping[int, CompleteCheckpoint]) -> set[int]:
        """Return the numbers of the checkpoints to keep."""
        rule, numbers = self.rule, sorted(of_fit)
        kept = set(numbers if rule.keep_last is None else numbers[-rule.keep_last :])
        if rule.keep_every is not None:
            counts = {number: of_fit[number].header["count"] for number in numbers}
            kept |= {n for n, count in counts.items() if count % rule.keep_every == 0}
        if rule.keep_best is not None:
            sign = -1.0 if largest_is_best(rule.keep_best, rule.mode) else 1.0
            scores = {number: sign * self._score(of_fit[number]) for number in numbers}
            scored = [number for number in numbers if math.isfinite(scores[number])]
            kept |= {min(scored, key=scores.__getitem__)} if scored else set()
        return kept

    def conclude(self) -> None:
        """Prune, and check on the client that the run has left a checkpoint."""
        self.prune()
        newest = self.series.newest()
        if newest is None or newest.stamp.run != self.run:
            raise SaveError(
                f"{self.series.store.url} has no complete checkpoint of this fit; do "
                "the client and all workers see the same folder? If so, a worker was "
                "lost while it wrote its part"
            )

    def _score(self, checkpoint: CompleteCheckpoint) -> float:
        rows: Sequence[Mapping[str, Any]] = checkpoint.header["rows"]
        score = rows[-1].get(self.rule.keep_best or "") if rows else None
        return math.nan if score is None else float(score)
