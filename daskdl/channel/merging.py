"""Sums on the way: updates that wait together travel as one frame with their sum.

Sums are exact, see :mod:`daskdl.codec.sums`. Whoever merges updates sends the sum to
all replicas, and each subtracts the updates that it already has, such as its own. This
module is for the scheduler, which does not import torch.
"""

from collections.abc import Mapping, Sequence

from daskdl import codec
from daskdl.channel.protocol import WIRE_BYTES, Message, MessageKind, unwrap
from daskdl.codec import Kind, SparseUpdate, SumEncoder, SumUpdate
from daskdl.codec.frame import SPARSE
from daskdl.errors import CodecError

# A smaller sum takes less time than the request of a worker that fetches it.
TREE_BYTES = 2**16
UNREADABLE = CodecError, TypeError, ValueError, LookupError  # errors of reading a frame


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

    Dense updates, updates of another size than the first one, repeated updates, those
    with which the sum might not fit int32, and unreadable ones stay as they are. One
    update is decoded at a time, so memory does not grow with their number.

    Args:
        messages: Updates, and sums of earlier ones.
        run: Id of the run.

    Returns:
        The messages, or their sum, followed by those that are not in it.
    """
    encoder: SumEncoder | None = None
    summed: list[Message] = []
    left: list[Message] = []
    for message in messages:
        update = _addend(message, run)
        if update is None:
            left.append(message)
            continue
        if encoder is None:
            encoder = SumEncoder(run, update.size)
        try:
            encoder.add(update, message.step)
        except CodecError:
            left.append(message)
        else:
            summed.append(message)
    if encoder is None or len(summed) < 2:
        return list(messages)
    frame = encoder.encode()
    if frame.nbytes + WIRE_BYTES >= sum(m.nbytes + WIRE_BYTES for m in summed):
        return list(messages)
    total = Message.control(MessageKind.SUM, nbytes=frame.nbytes, payload=frame)
    return [total, *left]


def fits_a_sum(message: Message) -> bool:
    """Whether a message holds a sparse update or a sum, according to its header."""
    try:
        return codec.read_kind(unwrap(message.payload)) in (*SPARSE, Kind.SUM)
    except UNREADABLE:
        return False


def _addend(message: Message, run: int) -> SparseUpdate | SumUpdate | None:
    """Return the sparse update, or the sum, of a message; None if none can be read."""
    try:
        frame = unwrap(message.payload)
        if message.kind == MessageKind.SUM:
            return codec.decode_sum(frame, run=run)
        update = codec.decode(frame, run=run)
    except UNREADABLE:
        return None
    if not isinstance(update, SparseUpdate):
        return None
    is_its_own = update.stamp[1:3] == (message.origin, message.sequence)
    return update if is_its_own else None
