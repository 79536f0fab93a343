"""How data are to be read, as the arguments of `fit`, `evaluate` and `predict` say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from daskdl.config import check_choice, check_count
from daskdl.data.batching import Batch, Transform
from daskdl.data.formats.loaders import Loader, loader_of
from daskdl.errors import OptionError

OnBad = Literal["raise", "skip"]
Approach = Literal["direct", "export"]


@dataclass(frozen=True)
class SourceOptions:
    """How parts are made of what the user gave.

    Attributes:
        batch_size: Rows per batch.
        shuffle_seed: Of the order in which data in memory are dealt out, or None.
        loader: Makes (x, y) of a file.
        collate_fn: Makes a batch of a list of a dataset's items.
        labelled: Whether labels are needed.
        accumulate: Batches of a step; parts of data in memory are whole steps.
        storage_options: Of the file systems of paths, for fsspec.
    """

    batch_size: int = 32
    shuffle_seed: int | None = None
    loader: Loader | Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    labelled: bool = True
    accumulate: int = 1
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ReadOptions:
    """The arguments that all three have in common; refused here if they are wrong.

    Attributes:
        batch_size: Rows per batch.
        transform: What is made of each batch, or None.
        loader: See `SourceOptions`, as `collate_fn`.
        on_bad_batch: What to do about a part that cannot be read.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> ReadOptions(32, on_bad_batch="ignore")
        Traceback (most recent call last):
        daskdl.errors.OptionError: on_bad_batch must be 'raise' or 'skip', got 'ignore'
    """

    batch_size: int
    transform: Transform | None = None
    loader: Loader | Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    on_bad_batch: OnBad = "raise"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_choice("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        if self.loader is not None:
            loader_of(self.loader)
        for name in ("transform", "collate_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"{name} must be a function or None, got {value!r}")

    def source(
        self, shuffle_seed: int | None, labelled: bool, accumulate: int = 1
    ) -> SourceOptions:
        """How parts are made of the data.

        Args:
            shuffle_seed: Of the order in which data in memory are dealt out, or None.
            labelled: Whether labels are needed.
            accumulate: Batches of a step.
        """
        return SourceOptions(
            self.batch_size,
            shuffle_seed,
            self.loader,
            self.collate_fn,
            labelled=labelled,
            accumulate=accumulate,
        )

    @property
    def skips(self) -> bool:
        """Whether parts that cannot be read are left out."""
        return self.on_bad_batch == "skip"


@dataclass(frozen=True)
class Both:
    """One transform after another; picklable.

    Attributes:
        first: What is done first.
        then: What is done with what that returns.
    """

    first: Transform
    then: Transform

    def __call__(self, batch: Batch) -> Batch:
        """Transform a batch."""
        return self.then(self.first(batch))


def one_of(*transforms: Transform | None) -> Transform | None:
    """All transforms in one, in this order; None of none."""
    made: Transform | None = None
    for transform in transforms:
        if transform is not None:
            made = transform if made is None else Both(made, transform)
    return made
