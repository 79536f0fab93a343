"""What is made of a model's outputs, and where they go."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskdl.data.batching import Tree
from daskdl.data.stores.store import Store, store_of
from daskdl.data.stores.urls import is_url
from daskdl.errors import OptionError

SAME = "same"

Postprocess = Callable[[Tree], Tree]


@dataclass(frozen=True)
class OutputOptions:
    """Arguments of `predict` about what comes out; refused here if they are wrong.

    Attributes:
        output: ``"same"``: returned, as the kind that came in; else a folder, a URL of
            fsspec or a path, to write to.
        postprocess: Of the outputs of a batch, on the worker, or None.
        keyed: Whether examples of bags and lists have keys; None: it is seen.
        storage_options: Of the file system of the URL, for fsspec.
        names: Of the columns of a single table, if there are as many.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> OutputOptions("arrays")
        Traceback (most recent call last):
        daskdl.errors.OptionError: output must be 'same' or a folder, as a URL or a \
path with a slash, got 'arrays'
    """

    output: str | os.PathLike[str] = SAME
    postprocess: Postprocess | None = None
    keyed: bool | None = None
    storage_options: Mapping[str, Any] | None = None
    names: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        _check_output(self.output)
        if self.postprocess is not None and not callable(self.postprocess):
            raise OptionError(
                "postprocess must be a function of the outputs of a batch, or None, "
                f"got {self.postprocess!r}"
            )
        if self.keyed not in (True, False, None):
            raise OptionError(f"keyed must be True, False or None, got {self.keyed!r}")
        if self.storage_options is not None and not self.writes:
            raise OptionError(
                "storage_options are those of output, which is 'same'; for data to "
                "read give daskdl.data.Files(X, storage_options=...)"
            )

    @property
    def writes(self) -> bool:
        """Whether the outputs are written to files."""
        return self.output != SAME

    @property
    def store(self) -> Store:
        """Where they are written to."""
        return Store(store_of(self.output).url, dict(self.storage_options or {}))

    @property
    def decisive(self) -> dict[str, Any]:
        """What tells these options from others, as plain values."""
        names = None if self.names is None else list(map(str, self.names))
        return {"keyed": self.keyed, "names": names}


def _check_output(output: Any) -> None:
    named = isinstance(output, os.PathLike) or is_url(output)
    slashed = isinstance(output, str) and ("/" in output or os.sep in output)
    if not (named or slashed or output == SAME):
        raise OptionError(
            "output must be 'same' or a folder, as a URL or a path with a slash, got "
            f"{output!r}"
        )
