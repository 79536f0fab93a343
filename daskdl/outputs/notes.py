"""Notes on errors of the user's code: where it was, beside its own traceback."""

from contextlib import AbstractContextManager
from types import TracebackType

from typing_extensions import override


class Noted(AbstractContextManager[None]):
    """Whatever is raised inside gets a note, and is raised.

    Args:
        note: Such as "in part 3".

    Example:
        >>> with Noted("in part 3"):
        ...     raise ValueError("no")
        Traceback (most recent call last):
        ValueError: no
        in part 3
    """

    def __init__(self, note: str) -> None:
        self._note = note

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self._note)
