"""How batch files are to be made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskdl.config import check_count, check_whole
from daskdl.data.batching import Rows
from daskdl.data.exports.origin import token_of
from daskdl.errors import OptionError


@dataclass(frozen=True)
class ExportOptions:
    """Sizes, order and contents of batch files.

    Attributes:
        batch_size: Rows of a batch, >= 1.
        batches_per_file: >= 1.
        seed: Of the shuffling, >= 0; None: rows keep their order.
        transform: What to do with each batch before it is written, on the worker;
            None: nothing. It gets and returns (x, y) of CPU tensors, y None without
            labels, and keeps the number of rows.
        classes: Names of the labels 0, 1, ...; None: those that the data have.
    """

    batch_size: int
    batches_per_file: int = 1
    seed: int | None = 0
    transform: Callable[[Rows], Rows] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_whole("batches_per_file", self.batches_per_file, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.transform is not None and not callable(self.transform):
            raise OptionError(
                "transform must be a function of a batch, or None, got "
                f"{self.transform!r}"
            )

    @property
    def file_rows(self) -> int:
        """Rows of each batch file but the last."""
        return int(self.batch_size) * int(self.batches_per_file)

    def to_json(self) -> Mapping[str, Any]:
        """What tells these options from others, as plain values."""
        transform = self.transform
        return {
            "batch_size": int(self.batch_size),
            "batches_per_file": int(self.batches_per_file),
            "seed": self.seed,
            "classes": None if self.classes is None else [str(c) for c in self.classes],
            "transform": None if transform is None else token_of(transform),
        }
