"""What a kind of predictions needs to be written, and to be read back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from dask.delayed import Delayed


class Encoded(NamedTuple):
    """What came out for a part, as bytes."""

    rows: int
    content: bytes


class Format(ABC):
    """How parts of one kind become files; picklable.

    Attributes:
        kind: In the manifest.
        suffix: Of the files.
    """

    kind: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def encoded(self, value: Any) -> Encoded:
        """What came out for a part, as the bytes of a file."""

    @abstractmethod
    def decoded(self, content: bytes) -> Any:
        """What came out for a part, from the bytes of its file."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What else is to be known to read, as plain values."""

    @classmethod
    @abstractmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""

    @abstractmethod
    def whole(self, values: Sequence[Any]) -> Any:
        """All parts together, in memory."""

    @abstractmethod
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        """All parts as a lazy collection.

        Args:
            parts: What was decoded, Delayed.
            rows: Of each.
        """
