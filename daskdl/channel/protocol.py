"""What travels: the operations, their messages and every value inside of them.

Messages are validated against their annotations on arrival: they come from other
machines. Frames of updates are bytes here (:mod:`daskdl.codec` reads them).
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
from dataclasses import dataclass
from itertools import accumulate
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np
from distributed.protocol import Serialize, Serialized, deserialize, serialize
from numpy.typing import NDArray

from daskdl import errors
from daskdl.callbacks import FailureInjection
from daskdl.codec import Stamp
from daskdl.config import Timeouts
from daskdl.errors import shown

logger = logging.getLogger(__name__)

COUNTS = range(2**63)  # no run has as many of anything
Natural = Annotated[int, COUNTS]
Positive = Annotated[int, range(1, 2**63)]
IntervalNumber = Annotated[int, range(-1, 2**63)]
RunId = Annotated[int, range(2**64)]  # drawn at random


# ---- validation


def hints_of(kind: Any) -> Mapping[str, Any]:
    """The annotations of a function's arguments, or of the fields of a class."""
    hints = get_type_hints(kind, include_extras=True)
    hints.pop("return", None)
    return hints


def check(fields: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuse fields that are not as annotated.

    Args:
        fields: Of a message.
        hints: Annotations by name; there may be more than fields.

    Raises:
        TypeError: If a field has another type or value, or is unknown.

    Example:
        >>> check({"step": 3, "last": -1}, {"step": Natural, "last": IntervalNumber})
        >>> check({"step": -1}, {"step": Natural})
        Traceback (most recent call last):
        TypeError: step must be int >= 0, got -1
        >>> check({"cut": [[0, "x"]]}, {"cut": Sequence[tuple[Natural, Natural]]})
        Traceback (most recent call last):
        TypeError: cut must be Sequence[tuple[int >= 0, int >= 0]], got [[0, 'x']]
    """
    for name, value in fields.items():
        if name not in hints:
            raise TypeError(f"there is no field {reprlib.repr(name)}")
        if not validator(hints[name])(value):
            wanted, got = _words(hints[name]), reprlib.repr(value)
            raise TypeError(f"{name} must be {wanted}, got {got}")


@functools.cache
def validator(hint: Any) -> Callable[[Any], bool]:
    """Compile an annotation to a function that says whether a value is as annotated.

    On the wire a tuple may be a list, and a NamedTuple has no names.

    Example:
        >>> valid = validator(Sequence[tuple[Natural, str]])
        >>> valid([[0, "a"]]), valid([(0, "a", 1)]), valid("a")
        (True, False, False)
    """
    names = {"__name__": __name__, "SEQUENCES": (list, tuple)}
    function: Callable[[Any], bool] = eval(
        f"lambda value: {_condition(hint, 'value', names)}", names
    )
    return function


def message_validator(hints: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
    """The same for all fields of a message, of which some may be missing."""
    names = {"__name__": __name__, "SEQUENCES": (list, tuple), "known": hints.keys()}
    fields = [
        f"({name!r} not in value or {_condition(hint, f'value[{name!r}]', names)})"
        for name, hint in hints.items()
    ]
    function: Callable[[Mapping[str, Any]], bool] = eval(
        f"lambda value: {' and '.join(['value.keys() <= known', *fields])}", names
    )
    return function


def _condition(hint: Any, value: str, names: dict[str, Any]) -> str:
    """A Python expression, true for a value that is as annotated.

    Args:
        hint: The annotation.
        value: An expression for the value.
        names: Globals of the expression; what it needs is added.
    """

    def named(constant: Any) -> str:
        name = f"_{len(names)}"
        names[name] = constant
        return name

    def each(values: str, condition: Callable[[str], str]) -> str:
        one = named(None)  # a name that no other expression has
        return f"all({condition(one)} for {one} in {values})"

    def of(inner: Any) -> Callable[[str], str]:
        return lambda expression: _condition(inner, expression, names)

    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return "True"
    if kind is Annotated:
        base, allowed = arguments
        return f"({of(base)(value)} and {value} in {named(allowed)})"
    if kind in (Union, UnionType):
        return f"({' or '.join(of(one)(value) for one in arguments)})"
    if kind is NoneType:
        return f"{value} is None"
    if kind is Sequence or (kind is tuple and arguments[-1] is Ellipsis):
        inner = of(arguments[0] if arguments else Any)  # of a text the letters: no
        return f"(isinstance({value}, SEQUENCES) and {each(value, inner)})"
    if kind in (Mapping, dict):
        key, inner_hint = arguments or (Any, Any)
        keys = each(value, of(key))
        values = each(f"{value}.values()", of(inner_hint))
        return f"(isinstance({value}, dict) and {keys} and {values})"
    if is_typeddict(kind):
        fields = hints_of(kind)
        parts = [of(one)(f"{value}[{name!r}]") for name, one in fields.items()]
        same = f"{value}.keys() == {named(fields.keys())}"
        return f"({' and '.join([f'isinstance({value}, dict)', same, *parts])})"
    if inspect.isclass(kind) and issubclass(kind, tuple):
        inner_hints = arguments or tuple(hints_of(kind).values())
        parts = [of(one)(f"{value}[{i}]") for i, one in enumerate(inner_hints)]
        long = f"isinstance({value}, SEQUENCES) and len({value}) == {len(inner_hints)}"
        return f"({' and '.join([long, *parts])})"
    kinds = named((int, float) if kind is float else kind)
    bool_too = "" if kind is bool else f" and not isinstance({value}, bool)"
    return f"(isinstance({value}, {kinds}){bool_too})"


WORDS = {
    repr(Natural): "int >= 0",
    repr(Positive): "int >= 1",
    repr(IntervalNumber): "int >= -1",
    repr(RunId): "int of 64 bits",
}


def _words(hint: Any) -> str:
    """An annotation as error messages show it."""
    text = hint.__name__ if inspect.isclass(hint) else repr(hint)
    for long, short in WORDS.items():
        text = text.replace(long, short)
    return text.replace("collections.abc.", "").replace("typing.", "")


# ---- requests and answers


NAME = "daskdl-channel"  # of the plugins, and where servers keep them


class Answer(enum.StrEnum):
    """The `status` of every answer."""

    OK = "ok"
    STOPPED = "stopped"  # the run was stopped; `reason` says why
    UNKNOWN = "unknown"  # no such run or replica here
    REFUSED = "refused"  # the message was not understood; `reason` says why


Fields = dict[str, Any]
Handler = Callable[..., Awaitable[Fields]]

LOG_S = 1.0  # least time between two lines about what was refused


class GoneError(Exception):
    """The run or replica is not here any more: the request may have been in time."""


# What a handler raises for a message that it cannot read; errors of daskdl are among
# them. Anything else is a bug: Dask logs it and answers with it.
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
    """Makes handlers of requests that validate, and refuse what they cannot read.

    Dask logs a traceback for each request whose handler raises; here it is refused and
    counted. Fields have to be as the handler annotates its arguments. Its answer gets
    the status ``"ok"`` if it has none; one that times out may be asked again.

    Args:
        refused: Counts a message; called with its fields, which may be anything.
    """

    def __init__(self, refused: Callable[[Fields], object]) -> None:
        self._refused = refused
        self._logged_at = -LOG_S

    def of(self, handler: Handler) -> Handler:
        """A handler that answers a message that it cannot read, too."""
        hints = {"run": RunId, **hints_of(handler)}
        valid = message_validator(hints)

        @functools.wraps(handler)
        async def guarded(**fields: Any) -> Fields:
            try:
                if not valid(fields):
                    check(fields, hints)
                return {"status": Answer.OK.value, **await handler(**fields)}
            except GoneError as error:
                return {"status": Answer.UNKNOWN.value, "reason": str(error)}
            except TimeoutError:  # who asks may ask again
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


def handlers_of(owner: Any) -> dict[str, Handler]:
    """The methods ``handle_x`` of a class or an object, as operations ``daskdl_x``."""
    names = [name for name in dir(owner) if name.startswith("handle_")]
    return {f"daskdl_{name[len('handle_') :]}": getattr(owner, name) for name in names}


# ---- operations

# requests to the scheduler, from a client
OPEN, WATCH, STOP, CLOSE = "daskdl_open", "daskdl_watch", "daskdl_stop", "daskdl_close"
ASSIGN, UNASSIGN, RESTORE = "daskdl_assign", "daskdl_unassign", "daskdl_restore"
# the same; the scheduler passes it on to a worker, and does not unpack the answer
AGREED = "daskdl_agreed"
# request to the scheduler, from a worker that has just come
ARRIVE = "daskdl_arrive"
# requests to the scheduler, from a replica
JOIN, ACTIVATE, PUBLISH = "daskdl_join", "daskdl_activate", "daskdl_publish"
LEASE, MISSING = "daskdl_lease", "daskdl_missing"
BARRIER, FAIL, LEAVE = "daskdl_barrier", "daskdl_fail", "daskdl_leave"
# request to a worker, from the scheduler or from a replica on another one
DELIVER = "daskdl_deliver"
# the same to a worker with several replicas, from the scheduler
DELIVER_BATCHES = "daskdl_deliver_batches"
# requests to a worker, from a replica on another one
SNAPSHOT, REPAIR, FETCH = "daskdl_snapshot", "daskdl_repair", "daskdl_fetch"

WIRE_BYTES = 32  # of msgpack around the frame of a message, measured: 24 to 32
# Of memory around that frame: the message, its numbers and its place in a queue or a
# ring. Measured by `benchmarks/queues.py`.
MESSAGE_BYTES = 304


class PeerProgress(NamedTuple):
    """How far a replica is."""

    step: Natural = 0  # steps completed
    sequence: Natural = 0  # of its last update
    interval: IntervalNumber = -1  # the last sync interval that it has completed


class Acknowledgement(TypedDict):
    """What a replica has sent and received, where replicas send to each other."""

    generation: Natural  # of the membership by which it sends
    adopted_at: Natural  # its last update when it adopted that, or later
    received: Sequence[tuple[Natural, Natural]]  # by origin: all up to this one


class FinishedLease(TypedDict):
    """A lease that a replica gives back."""

    lease: Natural  # its number
    examples: Natural
    loss: float  # mean of the epoch so far


# Errors that a client can raise: nobody else's are known to it.
ERRORS = frozenset(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DaskDLError)
)


class Failure(TypedDict):
    """An exception that ends a replica."""

    type: Annotated[str, ERRORS]
    summary: str
    traceback: str
    step: Natural
    pickled: bytes


class WorkerVersions(TypedDict):
    """Versions found on a worker, and why there are no more; empty where nothing."""

    daskdl: str
    torch: str
    error: str


# The generation, and each replica with its worker.
Members = tuple[Natural, Sequence[tuple[Natural, str]]]


class MessageKind(enum.StrEnum):
    """What a message says; plain strings on the wire, as the scheduler demands."""

    UPDATE = "update"  # payload: an encoded frame
    PROGRESS = "progress"  # origin has completed `step`; payload: its last interval
    JOINED = "joined"  # origin trains too from now on, at `step`
    MEMBERS = "members"  # payload: `Members`
    FAILED = "failed"  # origin is gone; nothing more comes from it
    STOP = "stop"  # payload: why


class Message(NamedTuple):
    """One entry of a queue between replicas, in order for each origin."""

    kind: str  # a MessageKind
    origin: int  # replica it is about
    sequence: int  # of an update, from 1; with progress, of the last one; else 0
    step: int  # steps the origin had completed
    nbytes: int  # of the payload
    payload: Any = None  # a frame, never unpacked by the scheduler; or plain values
    generation: int = 0  # in which the origin sent it, replica to replica

    @classmethod
    def update(
        cls, stamp: Stamp, completed: int, nbytes: int, payload: Any = None
    ) -> "Message":
        """Make the message of a frame.

        Args:
            stamp: Of the frame.
            completed: Steps the origin has completed with it: without the one of the
                stamp, if others of that step follow.
            nbytes: Of the frame.
            payload: The frame, as it is carried.
        """
        kind = MessageKind.UPDATE.value
        return cls(kind, stamp.origin, stamp.sequence, completed, nbytes, payload)

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> "Message":
        """Read a message as it came over the wire.

        Raises:
            ValueError: If its fields are not those of a message.
        """
        message = cls(*fields)
        numbers = (*message[1:5], message.generation)
        if not all(type(n) is int and n in COUNTS for n in numbers):  # no bool
            raise ValueError(
                f"a message needs whole numbers >= 0, got {reprlib.repr(numbers)}"
            )
        kind = MessageKind(message.kind)
        if kind in _PAYLOADS:
            valid, words = _PAYLOADS[kind]
            if not valid(message.payload):
                raise ValueError(f"{words}, got {reprlib.repr(message.payload)}")
        return message._replace(kind=kind.value)

    def to_wire(self) -> tuple[Any, ...]:
        """The same, with an array as payload serialised."""
        is_array = isinstance(self.payload, np.ndarray)
        return tuple(self._replace(payload=wrap(self.payload)) if is_array else self)

    def check_size(self) -> None:
        """Compare the size of the frame with what it says, without unpacking it.

        Raises:
            ValueError: If it differs, so that a queue would count it wrongly.
        """
        wrapped = isinstance(self.payload, Serialized)
        frames = self.payload.frames if wrapped else [unwrap(self.payload)]
        try:
            nbytes = sum(memoryview(frame).nbytes for frame in frames)
        except TypeError:
            raise ValueError(
                f"a frame must be bytes, got {type(self.payload)}"
            ) from None
        if nbytes != self.nbytes:
            raise ValueError(f"a frame of {self.nbytes} bytes came with {nbytes}")


_PAYLOADS = {
    MessageKind.PROGRESS: (validator(IntervalNumber), "progress needs an interval"),
    MessageKind.MEMBERS: (validator(Members), "it needs members"),
}


class BarrierKind(enum.StrEnum):
    """What a barrier is for."""

    AGREE = "agree"  # afterwards updates are held, until the next one
    REPORT = "report"  # the client reads the payloads too; an epoch is over
    SYNC = "sync"  # a sync interval is over, and not the epoch
    MEET = "meet"
    ROUND = "round"  # replicas that wait for a lease are not waited for, see `set_idle`


class WaitCause(enum.StrEnum):
    """Why a replica waits: the keys of ``history["waits"]``, see docs/tuning.md."""

    STALENESS = "staleness"
    ROOM = "room"
    LEASE = "lease"
    GATHER = "gather"
    FETCH = "fetch"
    FLUSH = "flush"
    UPDATES = "updates"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    MISSING = "missing"
    REPAIR = "repair"
    JOIN = "join"
    SNAPSHOT = "snapshot"
    ACTIVATE = "activate"


FAN_OUT = 8  # two hops reach 73 replicas, three 585


@dataclass(frozen=True)
class MeshTopology:
    """One tree for each origin over the members of one generation.

    In the tree of the origin with index `i` among the `n` members, the member
    with index `j` has position ``(j - i) % n``, and position `p` passes on to the
    positions ``fan_out * p + 1`` to ``fan_out * p + fan_out``. The origin is the
    root. While there are at most ``fan_out + 1`` members it sends to all others
    and nobody forwards. Beyond that the rotation puts every member at every
    position once over all origins, so that all forward the same amount; in one
    shared tree the inner nodes would carry up to `fan_out` times what the leaves do.

    Args:
        generation: Of the membership, >= 0.
        members: Replica numbers, >= 0, ascending and each once.
        fan_out: Most members one passes an update on to, >= 1.

    Example:
        >>> routes = MeshTopology(generation=3, members=(0, 1, 2, 5), fan_out=2)
        >>> routes.children(origin=5, node=5), routes.children(origin=5, node=0)
        ((0, 1), (2,))
    """

    generation: int
    members: tuple[int, ...]
    fan_out: int = FAN_OUT

    def children(self, origin: int, node: int) -> tuple[int, ...]:
        """To whom a member passes on an update; nobody if either is no member.

        Args:
            origin: Replica whose update it is.
            node: Replica that has it; the origin itself at first.
        """
        root, index = self._index(origin), self._index(node)
        if root is None or index is None:
            return ()
        count = len(self.members)
        first = self.fan_out * ((index - root) % count) + 1
        positions = range(first, min(first + self.fan_out, count))
        return tuple(self.members[(root + p) % count] for p in positions)

    def _index(self, replica: int) -> int | None:
        index = bisect_left(self.members, replica)
        found = index < len(self.members) and self.members[index] == replica
        return index if found else None


@dataclass(frozen=True)
class ChannelSpec:
    """One replica's end of a run.

    Attributes:
        run: RunId of the run.
        replica: Number of the replica.
        size: Parameters of the model.
        grid: Of the run at its start, parameter units.
        outbox_bytes: Bound of what waits to be sent.
        inbox_bytes: Bound of what waits to be applied.
        timeouts: Bounds on waiting.
        routing: ``"plain"`` or ``"mesh"``.
        fan_out: Most replicas that one passes an update on to, in a mesh.
        drops: On purpose: which updates that arrive here are dropped.
        in_step: Replicas make each step together.
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
    drops: Sequence[FailureInjection] = ()
    in_step: bool = False


PART_BYTES = 4 * 2**20  # of one answer: so much passes a slow link within a time-out

Arrays = Mapping[str, NDArray[Any]]
Form = Sequence[Any]  # name, dtype and shape of an array: plain values


class BlobParts:
    """Arrays, and how to cut their bytes.

    Args:
        arrays: Not changed any more.

    Example:
        >>> parcel = BlobParts({"a": np.arange(3), "b": np.float32([0.5])})
        >>> joined = join(parcel.forms, [parcel.part(i) for i in range(parcel.parts)])
        >>> joined["a"].tolist(), joined["b"].tolist()
        ([0, 1, 2], [0.5])
    """

    def __init__(self, arrays: Arrays) -> None:
        self.forms: list[Form] = [
            (name, array.dtype.str, list(array.shape)) for name, array in arrays.items()
        ]
        self._views_B = [_bytes_of(array) for array in arrays.values()]
        ends = list(accumulate(view_B.size for view_B in self._views_B))
        self._ends = ends
        self.nbytes = ends[-1] if ends else 0

    @property
    def parts(self) -> int:
        """How many there are, >= 1."""
        return max(1, -(-self.nbytes // PART_BYTES))

    def part(self, number: int) -> NDArray[np.uint8]:
        """The bytes of one part, from 0; without a copy where it is of one array.

        Raises:
            ValueError: If there is no such part.
        """
        if not 0 <= number < self.parts:
            raise ValueError(f"part must be in 0 .. {self.parts - 1}, got {number}")
        start = number * PART_BYTES
        stop = min(start + PART_BYTES, self.nbytes)
        cut = []
        for view_B, end in zip(self._views_B, self._ends, strict=True):
            first = end - view_B.size
            if first < stop and end > start:
                cut.append(view_B[max(start - first, 0) : stop - first])
        if len(cut) == 1:
            return cut[0]
        return np.concatenate(cut) if cut else np.empty(0, np.uint8)

    def to_wire(self, number: int) -> dict[str, Any]:
        """One part in an answer, the first with the forms."""
        return {
            "forms": self.forms if number == 0 else [],
            "parts": self.parts,
            "bytes": wrap(self.part(number)),
        }


def join(
    forms: Sequence[Form], parts: Sequence[NDArray[np.uint8]]
) -> dict[str, NDArray[Any]]:
    """Make arrays of the parts of a parcel; they may be read-only.

    Args:
        forms: Of the parcel.
        parts: All of them, in order.

    Raises:
        ValueError: If they do not go together.
    """
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


def wrap_arrays(payload: Any) -> Any:
    """A payload with its arrays wrapped; other values travel as they are."""
    if not isinstance(payload, dict):
        return payload
    return {k: wrap(v) if isinstance(v, np.ndarray) else v for k, v in payload.items()}


def unwrap_arrays(payload: Any) -> Any:
    """The inverse of :func:`wrap_arrays`."""
    if not isinstance(payload, dict):
        return payload
    return {key: unwrap(value) for key, value in payload.items()}


def compact(frame: NDArray[np.uint8]) -> Any:
    """A frame as it is kept in queues: nobody may write to it any more."""
    return frame.tobytes() if frame.nbytes <= PLAIN_BYTES else frame


def owned(payload: Any) -> Any:
    """A frame that came, compact: what it came in may be as large as a batch."""
    frame = unwrap(payload)
    if isinstance(frame, bytes):
        return frame
    return compact(np.frombuffer(frame, np.uint8).copy())
