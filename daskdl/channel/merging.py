"""Sums on the way: updates that wait together travel as one frame with their sum.

Sums are exact, see :mod:`daskdl.codec.sums`. Whoever merges updates sends the sum to
all replicas, and each subtracts the updates that it already has, such as its own. This
module is for the scheduler, which does not import torch.
"""

from collections.abc import Mapping, Sequence

from daskdl import codec
from daskdl.channel.protocol import WIRE_BYTES, Message, MessageKind, unwrap
from daskdl.codec import SparseUpdate, Summand
from daskdl.errors import CodecError

# A smaller sum takes less time than the request of a worker that fetches it.
TREE_BYTES = 2**16


def along_tree(
    total: Message, workers: Mapping[str, int], fan_out: int
) -> dict[str, Message]:
    """Return what is sent to each worker: a sum, or which worker to fetch it from.

    The scheduler sends the sum to the first `fan_out` workers; `fan_out` others fetch
    it from each of these and of the others. They take turns to be the first.

    Args:
        total: A sum with a number.
        workers: A replica on each worker, by address.
        fan_out: Number of workers.

    Example:
        >>> total = Message.control(MessageKind.SUM, sequence=4, nbytes=2**20)
        >>> workers = {"a": 0, "b": 1, "c": 2, "d": 3}
        >>> for worker, message in along_tree(total, workers, fan_out=1).items():
        ...     print(worker, message.kind, message.origin, message.sequence)
        a sum 0 4
        b sum at 0 4
        c sum at 1 4
        d sum at 2 4
    """
    addresses = list(workers)
    if total.nbytes < TREE_BYTES or len(addresses) <= fan_out:
        return dict.fromkeys(addresses, total._replace(sequence=0))
    turn = total.sequence * fan_out % len(addresses)
    order = addresses[turn:] + addresses[:turn]
    sent: dict[str, Message] = {}
    for place, worker in enumerate(order):
        if place < fan_out:
            sent[worker] = total
        else:
            source = workers[order[place // fan_out - 1]]
            sent[worker] = total._replace(kind=MessageKind.SUM_AT, origin=source)
    return sent


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
