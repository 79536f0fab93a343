"""What a place must provide that answers calls. No Dask.

Whatever says that a replica cannot be reached any more is an OSError, as Dask's own
errors of a connection are, and every time-out.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TypeVar

from daskdl.config import Bound
from daskdl.data.batching import Tree
from daskdl.errors import WaitTimeoutError
from daskdl.serialization import PackedModel
from daskdl.serving.answers import Failure, Outputs

T = TypeVar("T")


class Replica(ABC):
    """A model somewhere, which answers batches in the order in which they come.

    All methods are called on one event loop, and raise OSError if it is gone.

    Attributes:
        place: Where it is, for messages; several may be in one place.
        version: Of the model it answers by; 0: it has none. Changed by `CurrentModel`
            only, as what follows.
        staged: The version of the model that was sent last.
    """

    place: str
    version: int = 0
    staged: int = 0

    @abstractmethod
    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        """Unpack a model, beside the one in use."""

    @abstractmethod
    async def use(self, version: int) -> None:
        """Answer by a model that was staged: what is asked later is answered by it."""

    @abstractmethod
    async def discard(self) -> None:
        """Models that were staged are not wanted."""

    @abstractmethod
    async def ask(self, x: Tree) -> Outputs | Failure:
        """What the model says to the rows of a batch, numpy arrays."""

    @abstractmethod
    async def hear(self) -> None:
        """Whether it is there; one that hears nothing for long closes itself."""

    @abstractmethod
    async def close(self, wait: bool) -> None:
        """Leave nothing where it is.

        Args:
            wait: Until what it computes is done, and its model in memory no longer.
        """


class Ground(ABC):
    """Where replicas can be."""

    @abstractmethod
    async def places(self) -> list[str]:
        """The places that are there now, in a fixed order.

        Raises:
            OSError: If that cannot be known now.
            ChannelError: If nothing will be there any more.
        """

    @abstractmethod
    async def open(self, place: str, number: int, sharing: int) -> Replica:
        """Make a replica, without a model yet.

        Args:
            place: Where.
            number: No other one has it.
            sharing: Replicas that share a place at most.

        Raises:
            OSError: If the place is gone.
        """


async def within(doing: Awaitable[T], bound: Bound, what: str) -> T:
    """Wait for something, for so long.

    Args:
        doing: Cancelled if it takes longer.
        bound: How long that is.
        what: Did not come then, for the message.

    Raises:
        WaitTimeoutError: If it takes longer, which is an OSError.
    """
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait({task}, timeout=bound.seconds)
        if not task.done():
            raise WaitTimeoutError(f"{what} within {bound}")
        return task.result()
    finally:
        task.cancel()  # also if nobody waits any more; one that is done stays so
