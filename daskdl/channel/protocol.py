"""The protocol: operations, messages and the values inside them.

Messages from other machines are validated against their annotations on arrival.
Frames of updates stay bytes here; :mod:`daskdl.codec` decodes them.
"""

import asyncio
import enum
import functools
import inspect
import logging
import math
import reprlib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np
from distributed.protocol import Serialize, Serialized, deserialize, serialize
from msgspec import Meta, ValidationError, convert, defstruct
from numpy.typing import NDArray

from daskdl import errors
from daskdl.codec import Stamp
from daskdl.config import Timeouts
from daskdl.errors import shown

logger = logging.getLogger(__name__)

INT64_MAX = 2**63 - 1  # no counter or id is larger
Natural = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)]
IntervalNumber = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
RunId = Natural  # drawn at random
Token = Natural  # drawn at random, for a run or a task; kept secret


# ---- validation

T = TypeVar("T")

BUILTIN_TYPES = (bytes,)  # else msgspec reads bytes fields from base64 text


def hints_of(kind: Any) -> Mapping[str, Any]:
    """Return the annotations of a function's arguments or of a class's fields."""
    hints = get_type_hints(kind, include_extras=True)
    hints.pop("return", None)
    return hints


def read(value: Any, kind: type[T]) -> T:
    """Convert a value of a message to a NamedTuple, or to another type.

    Example:
        >>> read([3, 1], PeerProgress)
        PeerProgress(step=3, sequence=1, interval=-1)
        >>> read([3, -1], PeerProgress)
        Traceback (most recent call last):
        TypeError: invalid [3, -1]: Expected `int` >= 0 - at `$[1]`
    """
    try:
        return convert(value, kind, builtin_types=BUILTIN_TYPES)
    except ValidationError as error:
        raise TypeError(f"invalid {reprlib.repr(value)}: {error}") from error


def reader(
    hints: Mapping[str, Any],
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that checks fields against annotations and converts them.

    Fields may be missing. Unknown fields are refused, also those of a TypedDict. Lists
    become tuples and NamedTuples, but fields with a TypedDict are returned unchanged.

    Example:
        >>> read_fields = reader({"progress": PeerProgress, "cut": Sequence[Natural]})
        >>> read_fields({"progress": [3, 1]})
        {'progress': PeerProgress(step=3, sequence=1, interval=-1)}
        >>> read_fields({"cut": [0, "x"]})
        Traceback (most recent call last):
        TypeError: invalid cut [0, 'x']: Expected `int`, got `str` - at `$.cut[1]`
    """
    closed = {name: _closed(hint) for name, hint in hints.items()}
    unchanged = {name for name, hint in hints.items() if closed[name] is not hint}
    kind: Any = TypedDict("Fields", closed, total=False)  # type: ignore[misc]

    def read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            values: dict[str, Any] = convert(fields, kind, builtin_types=BUILTIN_TYPES)
        except ValidationError:
            for name, value in fields.items():
                _check_field(name, value, kind)
            raise
        if len(values) < len(fields):
            raise TypeError(f"unknown fields: {sorted(fields.keys() - values.keys())}")
        for name in unchanged:
            if name in fields:
                values[name] = fields[name]
        return values

    return read_fields


def check(fields: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Check fields against annotations and return them converted, see `reader`.

    Example:
        >>> check({"step": 3, "last": -1}, {"step": Natural, "last": IntervalNumber})
        {'step': 3, 'last': -1}
        >>> check({"step": -1}, {"step": Natural})
        Traceback (most recent call last):
        TypeError: invalid step -1: Expected `int` >= 0 - at `$.step`
    """
    return reader(hints)(fields)


def _check_field(name: str, value: Any, kind: Any) -> None:
    try:
        convert({name: value}, kind, builtin_types=BUILTIN_TYPES)
    except ValidationError as error:
        raise TypeError(f"invalid {name} {reprlib.repr(value)}: {error}") from error


def _closed(hint: Any) -> Any:
    """Replace each TypedDict in an annotation by a struct that has no other fields."""
    if is_typeddict(hint):
        fields = [(name, _closed(inner)) for name, inner in hints_of(hint).items()]
        return defstruct(hint.__name__, fields, forbid_unknown_fields=True)
    arguments = get_args(hint)
    closed = tuple(map(_closed, arguments))
    if closed == arguments:
        return hint
    origin = get_origin(hint)
    return Union[closed] if origin is UnionType else origin[closed]  # noqa: UP007


# ---- requests and answers


NAME = "daskdl-channel"  # name of the plugins, and their key on a server


class Answer(enum.StrEnum):
    """The `status` of every answer."""

    OK = "ok"
    STOPPED = "stopped"  # the run was stopped, see `reason`
    UNKNOWN = "unknown"  # no such run, replica or snapshot here (any more)
    REFUSED = "refused"  # invalid message, or a timeout, see `reason`


Fields = dict[str, Any]
Handler = Callable[..., Awaitable[Fields]]

LOG_S = 1.0  # least time between two warnings about refused messages


class GoneError(Exception):
    """The run, replica or snapshot of a request no longer exists.

    It may have existed when the request was sent.
    """


# Handlers raise these for messages that they cannot read; errors of daskdl are
# included. Any other exception is a bug: Dask logs and returns it.
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Guard:
    """Wraps request handlers: validates requests, and refuses unreadable ones.

    Dask logs a traceback for each request whose handler raises; a guarded handler
    refuses and counts the request instead. Fields must match the annotations of the
    handler's arguments. An answer without a status gets ``"ok"``. A handler that
    times out answers ``"refused"``; the sender may repeat the request.
    """

    def __init__(self, refused: Callable[[Fields], object]) -> None:
        self._refused = refused
        self._logged_at = -LOG_S

    def of(self, handler: Handler) -> Handler:
        """Wrap a handler; the result also answers messages that it cannot read."""
        hints = {"run": RunId, "secret": Token, "token": Token, **hints_of(handler)}
        read_fields = reader(hints)

        @functools.wraps(handler)
        async def guarded(**fields: Any) -> Fields:
            try:
                values = read_fields(fields)
                return {"status": Answer.OK.value, **await handler(**values)}
            except GoneError as error:
                return {"status": Answer.UNKNOWN.value, "reason": str(error)}
            except TimeoutError:  # the sender may retry
                reason = "it was not ready in time"
                return {"status": Answer.REFUSED.value, "reason": reason}
            except UNREADABLE as error:
                what = f"{type(error).__name__}: {error}"
            reason = shown(f"{handler.__name__}: {what}", 500)
            self._refused(fields)
            now = asyncio.get_running_loop().time()
            if now - self._logged_at >= LOG_S:
                self._logged_at = now
                logger.warning("refused a message: %s", reason)
            return {"status": Answer.REFUSED.value, "reason": reason}

        return guarded


def check_secret(secret: int | None, of_run: int) -> None:
    """Check that a request contains the secret of its run.

    The client draws the secret at random and passes it to the scheduler and the
    replicas. Code that runs on the cluster can read the secret.
    """
    if secret != of_run:
        raise ValueError("the request does not contain the secret of its run")


def handlers_of(owner: Any) -> dict[str, Handler]:
    """Return the ``handle_x`` methods of a class or object by operation, daskdl_x."""
    names = [name for name in dir(owner) if name.startswith("handle_")]
    return {f"daskdl_{name[len('handle_') :]}": getattr(owner, name) for name in names}


# ---- operations

# requests to the scheduler, from a client
OPEN, WATCH, STOP, CLOSE = "daskdl_open", "daskdl_watch", "daskdl_stop", "daskdl_close"
ASSIGN, UNASSIGN, RESTORE = "daskdl_assign", "daskdl_unassign", "daskdl_restore"
# the same; the scheduler forwards the request to a worker, the answer to the client
AGREED = "daskdl_agreed"
# request to the scheduler, from a client, and to workers, from the scheduler
DESCRIBE = "daskdl_describe"
# requests to the scheduler about the model, from a client; SPREAD also from a worker
OFFER, PUT, SPREAD = "daskdl_offer", "daskdl_put", "daskdl_spread"
# request for a part of the model, to the scheduler or a worker, from a worker
PART = "daskdl_part"
# requests to a worker about the model, from the scheduler
RECEIVE, DROP = "daskdl_receive", "daskdl_drop"
# request to the scheduler, from a new worker
ARRIVE = "daskdl_arrive"
# requests to the scheduler, from a replica
JOIN, SUBSCRIBE = "daskdl_join", "daskdl_subscribe"
ACTIVATE, PUBLISH = "daskdl_activate", "daskdl_publish"
LEASE, MISSING = "daskdl_lease", "daskdl_missing"
BARRIER, FAIL, LEAVE = "daskdl_barrier", "daskdl_fail", "daskdl_leave"
# the same; also to a worker, from a replica on another one
FETCH_SUM = "daskdl_fetch_sum"
OF_REPLICAS = {JOIN, SUBSCRIBE, ACTIVATE, PUBLISH, LEASE, MISSING, BARRIER, FAIL, LEAVE}
OF_REPLICAS |= {FETCH_SUM}
# request to a worker, from the scheduler or from a replica on another worker
DELIVER = "daskdl_deliver"
# request to a worker with several replicas, from the scheduler
DELIVER_BATCHES = "daskdl_deliver_batches"
# requests to a worker, from a replica on another worker
SNAPSHOT, REPAIR, FETCH = "daskdl_snapshot", "daskdl_repair", "daskdl_fetch"


RUN_BITS = 32  # of the id of a run


def run_id(run: int) -> str:
    """Return the id of a run as readers see it: in logs, pages, metrics and keys.

    Example:
        >>> run_id(0xBEEF)
        '0000beef'
    """
    return f"{run:0{RUN_BITS // 4}x}"


def task_key(run: int, replica: int) -> str:
    """Return the Dask key of the task that trains a replica."""
    return f"daskdl-train-{run_id(run)}-{replica}"


WIRE_BYTES = 32  # msgpack overhead of a message around its frame, measured: 24 to 32
# Memory overhead around a frame: the message, its numbers and its slot in a queue or a
# retransmit buffer. See tests/contract/test_queue_memory.py.
MESSAGE_BYTES = 304
# With an automatic interval, an exchange is postponed while more than these bytes of
# earlier updates wait in the outbox, or in the relay for one of the others. On a slow
# link, replicas then exchange less often, and no update waits long.
UNSENT_BYTES = 2**16


class PeerProgress(NamedTuple):
    """Progress of a replica."""

    step: Natural = 0  # steps completed
    sequence: Natural = 0  # sequence number of its last update
    interval: IntervalNumber = -1  # last sync interval completed


class Acknowledgement(TypedDict):
    """Updates that a replica of a mesh has sent and received."""

    generation: Natural  # generation of the membership it sends to
    adopted_at: Natural  # its last update when it adopted the generation, or later
    received: Sequence[tuple[Natural, Natural]]  # origin, last update without a gap


class FinishedLease(TypedDict):
    """A lease that a replica returns."""

    lease: Natural  # number of the lease
    examples: Natural
    loss: float  # mean of the epoch so far


class TrainedWork(TypedDict):
    """Sums over the leases of an epoch that a replica has finished."""

    loss_sum: float
    examples: Natural
    seconds: float
    skipped: Natural
    reason: str  # why the first example was skipped
    dropped: Natural
    logs: Mapping[str, tuple[float, Natural]]  # sum and rows, by name
    stop: str  # why a callback has stopped the fit; empty: none has
    excess: float  # weight of the losses in their mean minus `examples`


class ValidatedWork(TypedDict):
    """Scores of the validation leases of an epoch that a replica has finished."""

    score: Sequence[Any]
    unscored: str  # why the first example was left out
    measured: bytes  # packed states of metrics; empty: there are none


Work = TrainedWork | ValidatedWork

# Types to `read` the work of a phase as.
WORK: Mapping[str, Any] = {
    "train": _closed(TrainedWork),
    "validation": _closed(ValidatedWork),
}


class LiveReport(NamedTuple):
    """A replica's numbers while it trains, for the dashboard.

    Counters are of the fit so far, and other numbers of the last step. NaN: not
    measured.
    """

    at_s: float = math.nan  # seconds on the replica's clock
    epoch: Natural = 0
    step: Natural = 0  # steps of this replica, over all epochs
    loss_sum: float = 0.0  # over examples
    examples: Natural = 0
    sent_bytes: Natural = 0
    received_bytes: Natural = 0
    learning_rate: float = math.nan
    threshold: float = math.nan  # parameter units
    density: float = math.nan
    staleness: float = math.nan  # steps
    residual_norm: float = math.nan  # parameter units
    residual_p50: float = math.nan  # of abs(residual) / threshold
    residual_p99: float = math.nan
    excess: float = 0.0  # weight of the losses in their mean minus `examples`
    waits_s: Mapping[str, float] = {}  # by WaitCause


# Names of the error classes that a client can raise.
ERRORS = frozenset(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DaskDLError)
)


MAX_TEXT = 100_000  # characters; longer messages and tracebacks are shortened
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class Failure(TypedDict):
    """An exception that ends a replica, as text: nobody unpickles it."""

    type: Annotated[str, Meta(pattern=rf"\A({'|'.join(sorted(ERRORS))})\Z")]
    error: Text  # name of the exception's class, with its module
    summary: Text
    notes: Sequence[Text]  # see `BaseException.add_note`
    traceback: Text
    step: Natural


class WorkerVersions(TypedDict):
    """Versions of packages on a worker, and the error of importing them; else empty."""

    daskdl: str
    torch: str
    error: str


class Members(NamedTuple):
    """The members of one generation."""

    generation: Natural
    workers: Sequence[tuple[Natural, str]]  # replica, address of its worker


class MessageKind(enum.StrEnum):
    """Type of a message; a plain string on the wire."""

    UPDATE = "update"  # payload: an encoded frame
    # Payload: a frame with the sum of several updates, which names them. `sequence`:
    # its number, if others fetch it from the receiver.
    SUM = "sum"
    SUM_AT = "sum at"  # the worker of `origin` has or will get the sum `sequence`
    PROGRESS = "progress"  # origin has completed `step`; payload: its last interval
    JOINED = "joined"  # origin trains from now on, starting at `step`
    MEMBERS = "members"  # payload: `Members`; changes follow
    # From generation `sequence` on, `origin` is a member; payload: the address of its
    # worker. None: it is a member no longer.
    MEMBER = "member"
    FAILED = "failed"  # origin has failed or left, and sends no more messages
    PASSED_ON = "passed on"  # follows all updates before ``AGREE`` barrier `sequence`
    STOP = "stop"  # payload: the reason


class Message(NamedTuple):
    """A message in a queue between replicas, in order for each origin."""

    kind: MessageKind
    origin: Natural  # replica that the message is about
    sequence: Natural  # update: its number, from 1; progress: the last number; else 0
    step: Natural  # steps the origin had completed
    nbytes: Natural  # bytes of the payload
    # A frame, never unpacked by the scheduler; or plain values. That of a `SUM_AT` is
    # not sent: it stays in the queue of the relay.
    payload: Any = None
    generation: Natural = 0  # in a mesh, generation in which the origin sent it

    @classmethod
    def update(
        cls, stamp: Stamp, completed: int, nbytes: int, payload: Any = None
    ) -> "Message":
        """Make the message of a frame.

        Args:
            stamp: Stamp of the frame.
            completed: Steps the origin has completed with this update; excludes the
                stamp's step if more updates of that step follow.
            nbytes: Bytes of the frame.
            payload: The frame, as it is sent.
        """
        kind = MessageKind.UPDATE
        return cls(kind, stamp.origin, stamp.sequence, completed, nbytes, payload)

    @classmethod
    def control(
        cls,
        kind: MessageKind,
        origin: int = 0,
        *,
        sequence: int = 0,
        step: int = 0,
        nbytes: int = 0,
        payload: Any = None,
    ) -> "Message":
        """Make a message without a frame; fields that its kind does not use are 0."""
        return cls(kind, origin, sequence, step, nbytes, payload)

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> "Message":
        """Read a message that arrived over the wire."""
        message = read(fields, cls)
        if message.kind in PAYLOADS:
            read(message.payload, PAYLOADS[message.kind])
        return message

    def to_wire(self) -> tuple[Any, ...]:
        """Return the fields, with an array payload serialized."""
        if self.kind == MessageKind.SUM_AT:
            return tuple(self._replace(payload=None))
        is_array = isinstance(self.payload, np.ndarray)
        return tuple(self._replace(payload=wrap(self.payload)) if is_array else self)

    def check_size(self) -> None:
        """Compare the size of the frame with `nbytes`, without unpacking the frame."""
        wrapped = isinstance(self.payload, Serialized)
        frames = self.payload.frames if wrapped else [unwrap(self.payload)]
        try:
            nbytes = sum(memoryview(frame).nbytes for frame in frames)
        except TypeError:
            raise ValueError(
                f"a frame must be bytes, got {type(self.payload)}"
            ) from None
        if nbytes != self.nbytes:
            raise ValueError(f"expected a frame of {self.nbytes} bytes, got {nbytes}")


PAYLOADS: Mapping[str, Any] = {  # others are checked where they are used
    MessageKind.PROGRESS: IntervalNumber,
    MessageKind.MEMBERS: Members,
    MessageKind.MEMBER: str | None,
}


class BarrierKind(enum.StrEnum):
    """Purpose of a barrier."""

    AGREE = "agree"  # updates are held back until a barrier of another kind
    REPORT = "report"  # an epoch is over; the client reads the payloads too
    SYNC = "sync"  # a sync interval is over, but not the epoch
    MEET = "meet"  # replicas exchange payloads, nothing else
    RESUME = "resume"  # an epoch continues; payloads contain the work done in it
    ROUND = "round"  # does not wait for idle replicas, see `Channel.set_idle`


class WaitCause(enum.StrEnum):
    """What a wait is for: the keys of ``history["waits"]``, see docs/tuning.md."""

    STALENESS = "staleness"  # peers more than `max_staleness` steps behind
    ROOM = "room"  # space in the queue of own updates
    LEASE = "lease"  # rows to train on
    GATHER = "gather"  # the other replicas at a barrier
    FETCH = "fetch"  # a blob of another replica
    FLUSH = "flush"  # own updates to reach the scheduler
    UPDATES = "updates"  # updates that others have published
    CHECKPOINT = "checkpoint"  # a checkpoint to be written or read
    DATA = "data"  # the rows of the lease
    MISSING = "missing"  # a part of the data that was lost with its worker
    REPAIR = "repair"  # missing updates that this replica has requested
    JOIN = "join"  # the other initial replicas, or the start of the run
    SNAPSHOT = "snapshot"  # the state of another replica
    ACTIVATE = "activate"  # the end of an agreement, before a joining replica trains


FAN_OUT = 8  # two hops reach 73 replicas, three 585


@dataclass(frozen=True)
class MeshTopology:
    """One tree for each origin over the members of one generation.

    In the tree of the origin with index `i` among the `n` members, the member with
    index `j` has position ``(j - i) % n``, and position `p` forwards to the positions
    ``fan_out * p + 1`` to ``fan_out * p + fan_out``. The origin is the root. With at
    most ``fan_out + 1`` members, the origin sends to all others and no member forwards.
    With more, the rotation puts every member at every position once over all origins,
    so that all members forward the same amount; in one shared tree the inner nodes
    would carry up to `fan_out` times the load of the leaves.

    Example:
        >>> routes = MeshTopology(generation=3, members=(0, 1, 2, 5), fan_out=2)
        >>> routes.children(origin=5, node=5), routes.children(origin=5, node=0)
        ((0, 1), (2,))
    """

    generation: int
    members: tuple[int, ...]
    fan_out: int = FAN_OUT

    def children(self, origin: int, node: int) -> tuple[int, ...]:
        """Return the replicas to which a member forwards an update.

        Empty if `origin` or `node` is not a member.

        Args:
            origin: Replica that published the update.
            node: Replica that forwards the update; at first the origin itself.
        """
        root, index = self._index(origin), self._index(node)
        if root is None or index is None:
            return ()
        count = len(self.members)
        nearest = self.fan_out * ((index - root) % count) + 1
        positions = range(nearest, min(nearest + self.fan_out, count))
        return tuple(self.members[(root + p) % count] for p in positions)

    def _index(self, replica: int) -> int | None:
        index = bisect_left(self.members, replica)
        is_member = index < len(self.members) and self.members[index] == replica
        return index if is_member else None


@dataclass(frozen=True)
class ChannelSpec:
    """Settings of one replica's channel.

    Attributes:
        run: Id of the run.
        replica: Number of the replica.
        size: Parameters of the model.
        grid: Grid of the run at its start, parameter units.
        outbox_bytes: Bound on unsent updates, bytes.
        inbox_bytes: Bound on pending updates, bytes.
        timeouts: Bounds on waiting.
        routing: ``"plain"``: the scheduler relays updates; ``"merged"``: it sends sums
            of them, see `RunSpec`; ``"mesh"``: replicas forward them.
        fan_out: Most replicas to which a replica of a mesh forwards an update.
        in_step: Replicas take each step together.
        secret: Secret of the run, in each request about it, see `check_secret`.
        token: Proves to the scheduler that a request comes from this task.
    """

    run: int
    replica: int
    size: int
    grid: float
    outbox_bytes: int
    inbox_bytes: int
    timeouts: Timeouts
    routing: str = "plain"
    fan_out: int = FAN_OUT
    in_step: bool = False
    secret: int = field(default=0, repr=False)
    token: int = field(default=0, repr=False)


PART_BYTES = 4 * 2**20  # bytes per answer; crosses a slow link within the timeout

Arrays = Mapping[str, NDArray[Any]]
Form = tuple[str, str, Sequence[Natural]]  # name, dtype and shape of an array


class BlobParts:
    """Arrays to transfer in parts.

    Example:
        >>> parcel = BlobParts({"a": np.arange(3), "b": np.float32([0.5])})
        >>> joined = join(parcel.forms, [parcel.part(i) for i in range(parcel.parts)])
        >>> joined["a"].tolist(), joined["b"].tolist()
        ([0, 1, 2], [0.5])
    """

    def __init__(self, arrays: Arrays, part_bytes: int | None = None) -> None:
        self._part_bytes = part_bytes or PART_BYTES
        self.forms: list[Form] = [
            (name, array.dtype.str, list(array.shape)) for name, array in arrays.items()
        ]
        self._views_B = [_bytes_of(array) for array in arrays.values()]
        ends = list(accumulate(view_B.size for view_B in self._views_B))
        self._ends = ends
        self.nbytes = ends[-1] if ends else 0

    @property
    def parts(self) -> int:
        """Number of parts, >= 1."""
        return max(1, -(-self.nbytes // self._part_bytes))

    def part(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a part, without a copy if it lies within one array."""
        if not 0 <= number < self.parts:
            raise ValueError(f"part must be in 0 .. {self.parts - 1}, got {number}")
        start = number * self._part_bytes
        stop = min(start + self._part_bytes, self.nbytes)
        cut = []
        for view_B, end in zip(self._views_B, self._ends, strict=True):
            begin = end - view_B.size
            if begin < stop and end > start:
                cut.append(view_B[max(start - begin, 0) : stop - begin])
        if len(cut) == 1:
            return cut[0]
        return np.concatenate(cut) if cut else np.empty(0, np.uint8)

    def to_wire(self, number: int) -> dict[str, Any]:
        """Return the fields of an answer with a part; the first has the forms too."""
        return {
            "forms": self.forms if number == 0 else [],
            "parts": self.parts,
            "bytes": wrap(self.part(number)),
        }


def join(
    forms: Sequence[Form], parts: Sequence[NDArray[np.uint8]]
) -> dict[str, NDArray[Any]]:
    """Rebuild arrays from parts; the arrays may be read-only."""
    whole_B = parts[0] if len(parts) == 1 else np.concatenate(parts)
    shapes = {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in forms}
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values()]
    if sum(sizes) != whole_B.size:
        raise ValueError(
            f"need {sum(sizes)} bytes for {len(sizes)} arrays, got {whole_B.size}"
        )
    arrays, start = {}, 0
    for (name, (dtype, shape)), size in zip(shapes.items(), sizes, strict=True):
        piece_B = whole_B[start : start + size]
        if start % dtype.alignment:
            piece_B = piece_B.copy()
        arrays[name] = piece_B.view(dtype).reshape(shape)
        start += size
    return arrays


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# Frames up to this size are plain bytes in messages and queues: Dask's wrapper of an
# array takes 1.2 to 1.8 KB. Larger frames travel beside the message, not copied.
PLAIN_BYTES = 2**16


def wrap(value: Any) -> Any:
    """Serialize an array or a tree in advance, so that Dask does not compress it.

    The result shares the memory of arrays, which must not be changed any more.
    """
    return Serialized(*serialize(value))


def unwrap(payload: Any) -> Any:
    """Undo `wrap`; Dask's comms deliver payloads in different forms."""
    if isinstance(payload, Serialized):
        return deserialize(payload.header, payload.frames)
    if isinstance(payload, Serialize):
        return payload.data
    return payload


def wrap_arrays(payload: Any) -> Any:
    """Wrap the arrays of a payload; other values stay as they are."""
    if not isinstance(payload, dict):
        return payload
    return {k: wrap(v) if isinstance(v, np.ndarray) else v for k, v in payload.items()}


def unwrap_arrays(payload: Any) -> Any:
    """The inverse of :func:`wrap_arrays`."""
    if not isinstance(payload, dict):
        return payload
    return {key: unwrap(value) for key, value in payload.items()}


def nbytes_of(value: Any) -> int:
    """Return about how many bytes a value of a message takes; arrays stay packed.

    Example:
        >>> nbytes_of({"a": [1, 2.5], "b": b"1234"})
        62
    """
    if isinstance(value, Serialized):
        return sum(memoryview(frame).nbytes for frame in value.frames)
    if isinstance(value, Serialize):
        return nbytes_of(value.data)
    if isinstance(value, Mapping):
        return 8 + sum(nbytes_of(key) + nbytes_of(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 8 + sum(map(nbytes_of, value))
    if isinstance(value, str | bytes):
        return 8 + len(value)
    return int(getattr(value, "nbytes", 8))


def for_queue(frame: NDArray[np.uint8]) -> Any:
    """Return a frame for a queue; it must not be changed any more."""
    return frame.tobytes() if frame.nbytes <= PLAIN_BYTES else frame


def copied(payload: Any) -> Any:
    """Copy a received frame out of its buffer, which may hold a whole batch."""
    frame = unwrap(payload)
    if isinstance(frame, bytes):
        return frame
    return for_queue(np.frombuffer(frame, np.uint8).copy())
