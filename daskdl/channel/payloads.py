"""Arrays and frames on their way through Dask's comms, unopened by the scheduler."""

from typing import Any

import numpy as np
from distributed.protocol import Serialize, Serialized, deserialize, serialize
from numpy.typing import NDArray

from daskdl.channel.messages import Item

# Frames up to this are plain bytes, in messages and in queues: what Dask puts around an
# array is 1.2 to 1.8 KB in memory. Larger ones travel beside the message, not copied.
PLAIN_BYTES = 2**16


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


def compact(frame: NDArray[np.uint8]) -> Any:
    """A frame as it is kept in queues: nobody may write to it any more."""
    return frame.tobytes() if frame.nbytes <= PLAIN_BYTES else frame


def owned(payload: Any) -> Any:
    """A frame that came, compact: what it came in may be as large as a batch."""
    frame = unwrap(payload)
    if isinstance(frame, bytes):
        return frame
    return compact(np.frombuffer(frame, np.uint8).copy())


def fields_of(item: Item) -> tuple[Any, ...]:
    """An item as it goes over the wire."""
    is_array = isinstance(item.payload, np.ndarray)
    return tuple(item._replace(payload=wrap(item.payload)) if is_array else item)


def check_size(item: Item) -> None:
    """Look at how large a frame says that it is, without unpacking it.

    Raises:
        ValueError: If it is not that large, so that a queue would count it wrongly.
    """
    payload = item.payload
    frames = payload.frames if isinstance(payload, Serialized) else [unwrap(payload)]
    try:
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
    except TypeError:
        raise ValueError(f"a frame must be bytes, got {type(payload)}") from None
    if nbytes != item.nbytes:
        raise ValueError(f"a frame of {item.nbytes} bytes came with {nbytes}")
