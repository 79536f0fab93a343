"""How one replica fetches what another one has on its shelf."""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskdl.channel import messages
from daskdl.channel.messages import Answer
from daskdl.channel.parcel import join
from daskdl.channel.payloads import unwrap
from daskdl.channel.remote_waits import RemoteWaits
from daskdl.errors import WaitTimeoutError

logger = logging.getLogger(__name__)

AGAIN_S = 0.1  # until one is asked again that did not answer


class Fetching:
    """Requests for parcels, a part at a time; the training thread waits.

    Args:
        waits: Where it waits.
        worker_of: Where a replica is; None: it is gone.
    """

    def __init__(
        self, waits: RemoteWaits, worker_of: Callable[[int], str | None]
    ) -> None:
        self._waits = waits
        self._worker_of = worker_of

    def fetch(self, replica: int, name: str) -> dict[str, NDArray[Any]] | None:
        """Wait for a parcel and bring it; None if the replica goes before.

        Args:
            replica: Another one.
            name: Of the parcel.

        Raises:
            WaitTimeoutError: If it is there, and the parcel does not come.
        """
        first = self._part(replica, name, 0)
        if first is None:
            return None
        parts = [unwrap(first["bytes"])]
        for number in range(1, first["parts"]):
            answer = self._part(replica, name, number)
            if answer is None:
                return None
            parts.append(unwrap(answer["bytes"]))
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        return join(first["forms"], arrays)

    def _part(self, replica: int, name: str, part: int) -> Any:
        bound = self._waits.patience
        deadline = time.monotonic() + bound.seconds
        while (worker := self._worker_of(replica)) is not None:
            answer = self._waits.ask_worker(
                worker, messages.FETCH, replica=replica, name=name, part=part
            )
            if answer is not None and answer["status"] == Answer.OK:
                return answer
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"waited {bound} for {name!r} of replica {replica} on {worker}; "
                    f"last heard: {self._waits.last_heard()}"
                )
            # Not at once: one that died is known to be gone a little later.
            gone = lambda: self._worker_of(replica) is None  # noqa: E731
            self._waits.until_true("fetch", gone, AGAIN_S)
        return None
