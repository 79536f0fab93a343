"""Where predictions are written to, and what has been written there already."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from daskdl.data.exports import manifest as exports
from daskdl.data.exports.origin import differences
from daskdl.data.exports.progress import Progress
from daskdl.data.stores.store import Store
from daskdl.errors import DataError, OptionError
from daskdl.predictions import manifest
from daskdl.predictions.base import Format
from daskdl.predictions.manifest import Manifest
from daskdl.predictions.part_file import PartFile
from daskdl.predictions.predictions import Predictions

logger = logging.getLogger(__name__)

_FOLDER = ".predicting"
_KIND = "part"  # of a record of progress
_LOOKED_AT_AT_A_TIME = 8  # each is a request that mostly waits


@dataclass(frozen=True)
class Target:
    """A folder, for predictions of one model, of one data set.

    Attributes:
        store: The folder.
        made_from: What tells these from other predictions.
    """

    store: Store
    made_from: Mapping[str, Any]

    def finished(self) -> Predictions | None:
        """What is there, if it is finished.

        Raises:
            OptionError: If there is something else.
        """
        if self.store.exists(exports.NAME):
            raise OptionError(
                f"there are batch files in {self.store.url}; give another URL"
            )
        done = self.store.exists(manifest.NAME)
        before = (
            Manifest.read(self.store).made_from if done else self._progress.origin()
        )
        differing = "" if before is None else differences(before, self.made_from)
        if differing:
            what = "are predictions" if done else "are unfinished predictions"
            raise OptionError(
                f"there {what} of another model, other data or other options in "
                f"{self.store.url}: {differing}; give another URL, or delete the folder"
            )
        if not done:
            return None
        logger.info("predictions are in %s already", self.store.url)
        return Predictions(self.store.url, self.store.options)

    def begin(self) -> dict[int, PartFile]:
        """Begin, or go on: the files that are there, by the number of their part."""
        if self._progress.origin() is None:
            self._progress.begin(self.made_from)
            return {}
        records = self._progress.done(_KIND)
        files = {part: PartFile.from_json(record) for part, record in records.items()}
        with ThreadPoolExecutor(_LOOKED_AT_AT_A_TIME) as pool:
            there = list(
                pool.map(lambda file: file.is_there(self.store), files.values())
            )
        return {part: files[part] for part, ok in zip(files, there, strict=True) if ok}

    def write(self, form: Format, part: int, value: Any) -> PartFile:
        """Write what came out for a part, on whatever worker that is.

        Raises:
            DataError: If it cannot be written, or the run is over, or this is not the
                same place as that of the client.
        """
        self._progress.check()
        rows, content = form.encoded(value)
        file = PartFile.of(content, rows, part, form.suffix)
        self.store.write(file.name, content)
        try:
            self._progress.add(_KIND, part, file.to_json())
        except DataError:  # it was believed to be dead, and is not needed any more
            if not self._has(file):
                self.store.delete([file.name])
            raise
        return file

    def finish(self, form: Format, files: Mapping[int, PartFile]) -> Predictions:
        """Say that all is there, and delete what was only needed until then."""
        in_order = tuple(files[part] for part in sorted(files))
        Manifest(form, in_order, self.made_from).write(self.store)
        self._progress.end()
        names = {file.name for file in in_order}
        found = self.store.names(f"{_KIND}-*.{form.suffix}")
        self.store.delete([name for name in found if name not in names])
        logger.info("predictions are in %s", self.store.url)
        return Predictions(self.store.url, self.store.options)

    @property
    def _progress(self) -> Progress:
        return Progress(self.store, "prediction", _FOLDER)

    def _has(self, file: PartFile) -> bool:
        finished = self.store.exists(manifest.NAME)
        return finished and file in Manifest.read(self.store).files
