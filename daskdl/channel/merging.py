"""Sums on the way: updates that wait together travel as one frame with their sum.

Sums are exact, see :mod:`daskdl.codec.sums`. Whoever merges updates sends the sum to
all replicas, and each subtracts the updates that it already has, such as its own. This
module is for the scheduler, which does not import torch.
"""

from collections.abc import Mapping, Sequence

from daskdl import codec
from daskdl.channel.protocol import WIRE_BYTES, Message, MessageKind, unwrap
from daskdl.codec import DenseUpdate, SumEncoder, SumUpdate, Update
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


def merged(messages: Sequence[Message], run: int, excess: float = 1.0) -> list[Message]:
    """Merge updates into a sum, and dense ones into another, if that takes fewer bytes.

    Dense updates have far smaller units than others, so that one of them would make a
    sum of all several times as large. Updates of another size than the first one,
    repeated updates, those with which a sum might not fit int32, and unreadable ones
    stay as they are. One update is decoded at a time, so memory does not grow with
    their number.

    Args:
        messages: Updates, and sums of earlier ones.
        run: Id of the run.
        excess: A sum may take so many times as many bytes, since it travels along the
            tree; with more than 1, there may be a sum of one large update.

    Returns:
        The messages, or in their place sums, followed by those that are in none.
    """
    encoders: dict[bool, SumEncoder] = {}
    summed: dict[bool, list[Message]] = {False: [], True: []}
    left: list[Message] = []
    size: int | None = None
    for message in messages:
        update = _addend(message, run)
        if update is None or (size or update.size) != update.size:
            left.append(message)
            continue
        size = update.size
        is_wide = (
            update.is_wide
            if isinstance(update, SumUpdate)
            else isinstance(update, DenseUpdate)
        )
        if is_wide not in encoders:
            encoders[is_wide] = SumEncoder(run, size)
        try:
            encoders[is_wide].add(update, message.step)
        except CodecError:
            left.append(message)
        else:
            summed[is_wide].append(message)
    sums: list[Message] = []
    for is_wide, encoder in encoders.items():
        singles = summed[is_wide]
        before = sum(m.nbytes + WIRE_BYTES for m in singles)
        most = before * excess if before > TREE_BYTES else before
        is_sum = len(singles) > 1 or most > before
        frame = encoder.encode() if is_sum else None
        if frame is None or frame.nbytes + WIRE_BYTES >= most:
            left += singles
        else:
            nbytes = frame.nbytes
            sums.append(Message.control(MessageKind.SUM, nbytes=nbytes, payload=frame))
    if not sums:
        return list(messages)
    return [*sums, *left]


def fits_a_sum(message: Message) -> bool:
    """Whether a message holds an update or a sum, according to the header."""
    try:
        codec.read_kind(unwrap(message.payload))
    except UNREADABLE:
        return False
    return True


def _addend(message: Message, run: int) -> Update | SumUpdate | None:
    """Return the update, or the sum, of a message; None if none can be read."""
    try:
        frame = unwrap(message.payload)
        if message.kind == MessageKind.SUM:
            return codec.decode_sum(frame, run=run)
        update = codec.decode(frame, run=run)
    except UNREADABLE:
        return None
    is_its_own = update.stamp[1:3] == (message.origin, message.sequence)
    return update if is_its_own else None
