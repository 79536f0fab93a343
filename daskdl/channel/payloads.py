"""Arrays on their way through Dask's comms, unopened by the scheduler."""

from typing import Any

import numpy as np
from distributed.protocol import Serialize, Serialized, deserialize, serialize
from numpy.typing import NDArray


def wrap(array: NDArray[Any]) -> Any:
    """Serialise an array here, so that Dask does not compress it on its way.

    The frames are the array's own memory: nobody may write to it any more.
    """
    return Serialized(*serialize(array))


def unwrap(payload: Any) -> Any:
    """A payload as its sender wrapped it, whatever the comm made of it."""
    if isinstance(payload, Serialized):
        return deserialize(payload.header, payload.frames)
    if isinstance(payload, Serialize):
        return payload.data
    return payload


def wrap_note(note: Any) -> Any:
    """A note with its arrays wrapped; other values travel as they are."""
    if not isinstance(note, dict):
        return note
    return {k: wrap(v) if isinstance(v, np.ndarray) else v for k, v in note.items()}


def unwrap_note(note: Any) -> Any:
    """The inverse of :func:`wrap_note`."""
    if not isinstance(note, dict):
        return note
    return {key: unwrap(value) for key, value in note.items()}
