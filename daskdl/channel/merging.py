"""Sums on the way: updates that wait together travel as one frame with their sum.

Sums are exact, see :mod:`daskdl.codec.sums`. Whoever merges updates sends the sum to
all replicas, and each subtracts the updates that it already has, such as its own. This
module is for the scheduler, which does not import torch.
"""

from collections.abc import Sequence

from daskdl import codec
from daskdl.channel.protocol import WIRE_BYTES, Message, MessageKind, unwrap
from daskdl.codec import SparseUpdate, Summand
from daskdl.errors import CodecError


def merged(messages: Sequence[Message], run: int) -> list[Message]:
    """Merge updates into a sum, if that takes fewer bytes.

    Dense updates, updates of another size than the first one, repeated updates, and
    what cannot be read stay as they are.

    Args:
        messages: Updates.
        run: Id of the run.

    Returns:
        The updates, or the sum, followed by those that are not in it.
    """
    summed: list[Message] = []
    updates: list[SparseUpdate] = []
    names: dict[tuple[int, int], Summand] = {}
    left: list[Message] = []
    for message in messages:
        name, update = message[1:3], _sparse(message, run)
        if (
            update is None
            or name in names
            or (updates and update.size != updates[0].size)
        ):
            left.append(message)
            continue
        names[name] = Summand(*name, message.step)
        summed.append(message)
        updates.append(update)
    if len(summed) < 2:
        return list(messages)
    try:
        frame = codec.encode_sum(run, updates, list(names.values()))
    except CodecError:  # it may not fit
        return list(messages)
    if frame.nbytes + WIRE_BYTES >= sum(m.nbytes + WIRE_BYTES for m in summed):
        return list(messages)
    total = Message.control(MessageKind.SUM, nbytes=frame.nbytes, payload=frame)
    return [total, *left]


def _sparse(message: Message, run: int) -> SparseUpdate | None:
    """Return the sparse update of a message; None if it has none that can be read."""
    try:
        update = codec.decode(unwrap(message.payload), run=run)
    except (CodecError, TypeError, ValueError, LookupError):
        return None
    if not isinstance(update, SparseUpdate):
        return None
    is_its_own = update.stamp[1:3] == (message.origin, message.sequence)
    return update if is_its_own else None
