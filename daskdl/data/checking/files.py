"""Parts that are made of files, so that a file can be named, and be moved away."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from daskdl.data.batching import Rows


@runtime_checkable
class OfFiles(Protocol):
    """What a source offers besides, whose parts are made of files."""

    def file_urls(self, part: int) -> Sequence[str]:
        """The files that a part is made of, each in one part only.

        Args:
            part: Its number, from 0.
        """

    def load_file(self, part: int, file: int) -> Rows:
        """Load one of several files of a part, like `load` of a part of this file.

        Args:
            part: Its number, from 0.
            file: Which of its `file_urls`, from 0.
        """
