"""What a training algorithm provides: the frozen plan and the exchange of one replica.

A :class:`TrainingMaster` is chosen by the user and travels. The :class:`Exchange` it
makes lives in one replica and moves its parameters.
"""

import contextlib
import copy
import dataclasses
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from daskdl.channel.base import Channel
from daskdl.channel.protocol import FAN_OUT
from daskdl.compression.flat import (
    FlatParameters,
    Untrained,
    load_counts_,
    load_untrained_,
)
from daskdl.config import Timeouts, check_bound, check_whole
from daskdl.errors import CodecError, DaskDLError, SaveError
from daskdl.serialization import Packed
from daskdl.thresholds import Sent


@dataclass
class ExchangeStats:
    """Counts what an exchange does in one epoch."""

    exchanges: int = 0
    density_sum: float = 0.0  # entries sent / parameters, summed over exchanges
    threshold: float = math.nan  # the last one, parameter units; of several the mean
    clipped: float = 0.0  # mass removed by clipping, parameter units
    lead_sum: int = 0  # steps ahead of the slowest replica, summed over steps
    steps: int = 0
    frozen_bytes: int = 0  # sent to all at the last barrier, see `Untrained`


class StepStats(NamedTuple):
    """What one step exchanged and left; columns of `history.STEP_COLUMNS`."""

    threshold: float = math.nan
    density: float = math.nan
    sent_bytes: int = 0
    kind: str | None = None
    residual_norm: float = math.nan
    residual_p50: float = math.nan
    residual_p90: float = math.nan
    residual_p99: float = math.nan
    staleness: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    apply_s: float = 0.0


def trained_in(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name; views, not copies.

    Example:
        >>> list(trained_in(nn.BatchNorm1d(2)))
        ['weight', 'bias']
    """
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def largest_in(module: nn.Module) -> float:
    """The largest absolute value of a trainable parameter; NaN if one is.

    Example:
        >>> largest_in(nn.LayerNorm(2))
        1.0
    """
    parameters = [p for p in trained_in(module).values() if p.numel()]
    largest = [float(end.abs()) for p in parameters for end in p.aminmax()]
    return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)


def others_in(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers by name; views, not copies.

    Example:
        >>> list(others_in(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    return {n: t.detach() for n, t in (*frozen.items(), *module.named_buffers())}


def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a module; parameters that are not given stay unchanged.

    Args:
        module: Changed in place; its tensors stay the same objects.
        tensors: By name, on any device; at least those of `others_in`.

    Raises:
        SaveError: If names or shapes do not match those of the module.
    """
    others = others_in(module)
    own = {**trained_in(module), **others}
    for name in {**tensors, **others}:
        theirs, ours = _shape(tensors.get(name)), _shape(own.get(name))
        if theirs != ours:
            raise SaveError(
                f"{name} is {theirs} in the checkpoint, and {ours} in the model"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape.

    Example:
        >>> described(torch.zeros(2, 3))
        'float32 (2, 3)'
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)}"


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


@dataclass
class Parameters:
    """A replica's parameters and buffers as they leave it; one of the two forms.

    Attributes:
        exact: State dict of one replica's own module, on the CPU; else None.
        shared_N: Steps of `grid` that all replicas agree on, int32, else None.
        residual_N: Steps of `grid` that have not been sent, of this replica, or of all
            together, int32, else None. They are no part of the model.
        grid: Parameter units per step.
        untrained: Averaged buffers, and frozen parameters that the model has changed,
            where the parameters are not `exact`; see `Untrained`.
        hidden: With `exact`, buffers that are not in the state dict, by name.
        digest: Checksum of what is equal on all replicas after a sync point.
    """

    exact: Mapping[str, Any] | None = None
    shared_N: NDArray[np.int32] | None = None
    residual_N: NDArray[np.int32] | None = None
    grid: float = 0.0
    untrained: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    digest: int = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.exact is not None or self.shared_N is not None

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """Copy those of a module to the CPU; tied ones stay tied on loading."""
        state, buffers = module.state_dict(), module.named_buffers()
        hidden = {name: value for name, value in buffers if name not in state}
        kept = [{n: v.cpu() for n, v in part.items()} for part in (state, hidden)]
        exact, hidden = copy.deepcopy(kept)
        return cls(exact=exact, hidden=hidden)

    def values(self) -> dict[str, Any]:
        """The same as plain values and tensors."""
        if self.shared_N is None:
            exact = None if self.exact is None else dict(self.exact)
            return {"exact": exact, "hidden": dict(self.hidden)}
        return {
            "shared": torch.from_numpy(self.shared_N),
            "grid": self.grid,
            "untrained": {n: torch.from_numpy(a) for n, a in self.untrained.items()},
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Parameters":
        """Read what `values` returned."""
        if "shared" not in values:
            return cls(exact=values["exact"], hidden=values.get("hidden", {}))
        untrained = {n: tensor.numpy() for n, tensor in values["untrained"].items()}
        shared_N, grid = values["shared"].numpy(), values["grid"]
        return cls(None, shared_N, None, grid, untrained)

    def load_into(self, module: nn.Module) -> None:
        """Load these parameters and buffers into a module, if there are any."""
        if self.exact is not None:
            _make_room_(module, self.exact, self.hidden)
            module.load_state_dict(self.exact)
            own = dict(module.named_buffers())
            for name in own.keys() & self.hidden.keys():
                own[name].copy_(self.hidden[name])
        elif self.shared_N is not None:
            load_counts_(module, self.shared_N, self.grid)
            load_untrained_(module, self.untrained)


def _make_room_(
    module: nn.Module, exact: Mapping[str, Any], hidden: Mapping[str, Tensor]
) -> None:
    """Register and resize buffers, so that the tensors can be loaded."""
    tensors = {**exact, **hidden}
    for prefix, part in module.named_modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            new = tensors.get(f"{prefix}.{leaf}" if prefix else leaf)
            if new is not None and _form(new) != _form(buffer):
                setattr(part, leaf, torch.empty_like(new))
    own = dict(module.named_buffers())
    for name in own.keys() - tensors.keys():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, None)
    # A state dict may have other names than the parameters and buffers.
    there = {*own, *module.state_dict()}
    for name in [name for name in tensors if name not in there]:
        path, _, leaf = name.rpartition(".")
        # Where there is no place for it, it is left out, or refused on loading.
        with contextlib.suppress(AttributeError, KeyError):
            new = torch.empty_like(tensors[name])
            module.get_submodule(path).register_buffer(leaf, new, name in exact)


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


class CompressionState(NamedTuple):
    """State of compression that one fit leaves to the next."""

    sent: Mapping[str, Sent]  # what the last exchange of each pattern did
    steps: int  # of all fits, of the replica that made most of them


class ExchangeResult(NamedTuple):
    """What one exchange leaves at the end of a fit, beside the agreed parameters."""

    compression: CompressionState = CompressionState({}, 0)
    residual_N: NDArray[np.int32] | None = None  # not sent, steps of the agreed grid


@dataclass(frozen=True, eq=False)
class KeptResidual:
    """The residuals of all replicas at the end of a fit, for the next one.

    Attributes:
        counts_N: Their sum, int32, steps of `grid`, in the order of FlatParameters.
        grid: Parameter units per step, a power of two.
        layout: Of the trainable parameters that it is beside, as `layout_of` says it.
        checksum: Of their values, as `checksum_of` says it.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> counts_N = np.array([5, -5], np.int32)
        >>> kept = KeptResidual.beside(layer, counts_N, 0.5)
        >>> [kept.share_N(place, replicas=2).tolist() for place in (0, 1)]
        [[3, -2], [2, -3]]
    """

    counts_N: NDArray[np.int32]
    grid: float
    layout: Mapping[str, str]
    checksum: int

    @classmethod
    def beside(
        cls, module: nn.Module, counts_N: NDArray[np.int32], grid: float
    ) -> "KeptResidual":
        """The residual of a fit that ended with a module's parameters."""
        return cls(counts_N, grid, layout_of(module), checksum_of(module))

    def fits(self, module: nn.Module) -> bool:
        """Whether a module has the same trainable parameters, with the same values."""
        same = list(self.layout.items()) == list(layout_of(module).items())
        return same and self.checksum == checksum_of(module)

    def share_N(self, place: int, replicas: int) -> NDArray[np.int32]:
        """Return the share of one initial replica of a run; shares sum up exactly.

        Args:
            place: Of the replica among them, from 0. The remainder of the division goes
                to the first ones.
            replicas: How many there are.
        """
        whole_N, left_N = np.divmod(self.counts_N, np.int32(replicas))
        return whole_N + (left_N > place)

    def deliver_(self, module: nn.Module) -> None:
        """Add all of it to a module's parameters."""
        load_counts_(module, self.counts_N, self.grid, add=True)


def layout_of(module: nn.Module) -> dict[str, str]:
    """Name, dtype and shape of the trainable parameters, in their order.

    Example:
        >>> layout_of(nn.Linear(2, 1))
        {'weight': 'float32 (1, 2)', 'bias': 'float32 (1,)'}
    """
    return {name: described(tensor) for name, tensor in trained_in(module).items()}


def checksum_of(module: nn.Module) -> int:
    """A CRC-32 of the values of the trainable parameters, on whatever device."""
    checksum = 0
    for tensor in trained_in(module).values():
        octets = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(octets.numpy().data, checksum)
    return checksum


# Kinds of the states of exchanges.
ALONE, SHARER, AVERAGER = "alone", "sharer", "averager"
PARAMETERS = "parameters"  # in what is common, where a module has them as they are
MODEL = "model"  # kind of an exchange whose only state is the model, and its snapshot


class State(NamedTuple):
    """State of an exchange between two epochs: plain values and tensors.

    Tensors are not copied.
    """

    kind: str  # of the exchange
    common: Mapping[str, Any]  # the same for all replicas
    own: Mapping[str, Any]


class Resumed(NamedTuple):
    """States of exchanges of another run that one replica takes over."""

    kind: str  # of the exchanges
    common: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]  # of replicas whose part it takes, maybe of none
    common_at: str = "what is common"  # where it was read, for messages
    own_at: Sequence[str] = ()

    def check(self, state: State) -> None:
        """Refuse states of another form than the one of the new exchange.

        Raises:
            SaveError: Naming the file and the field.
        """
        check_like(state.common, self.common, f"{self.common_at}: exchange")
        for own, at in zip(self.own, self.own_at, strict=False):
            check_like(state.own, own, f"{at}: exchange")

    @property
    def last(self) -> CompressionState | None:
        """The compression state of a replica that was alone; else None."""
        if self.kind != ALONE:
            return None
        with restoring(f"{self.common_at}: exchange"):
            two = self.common["sent"].items()
            sent = {p: Sent(float(t), float(d)) for p, (t, d) in two}
            check_like(0, self.common["made"], "made")  # steps
        return CompressionState(sent, self.common["made"])


@contextlib.contextmanager
def restoring(what: str) -> Iterator[None]:
    """Context manager: errors from wrong values mean that a checkpoint is damaged.

    Args:
        what: The file and the field.

    Raises:
        SaveError: In place of the errors of Python and torch.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, SaveError):
            raise SaveError(f"{what}: {error}") from error
        if isinstance(error, DaskDLError) and not isinstance(error, CodecError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise SaveError(f"{what} is damaged: {reason}") from error


def check_like(own: Any, found: Any, what: str, *, loose: bool = False) -> None:
    """Refuse a state that was read if its form differs from that of the own state.

    Types, fields, lengths and shapes are compared, values are not. None matches
    anything.

    Args:
        own: What would be written.
        found: What was read; it may have more fields.
        what: Its name in messages.
        loose: For states of another library's or the user's classes: lists and tensors
            may be of any length, None matches anything, private fields may be missing,
            and private lists are not compared.

    Raises:
        SaveError: Naming the field.
    """
    if isinstance(own, Tensor):
        fits = isinstance(found, Tensor) and (loose or found.shape == own.shape)
        _check(fits, own, found, what)
    elif isinstance(own, Mapping):
        _check(isinstance(found, Mapping), own, found, what)
        for name in filter(lambda name: isinstance(name, str), own):
            private = loose and name.startswith("_")
            if name not in found and not private:
                raise SaveError(f"{what}.{name} is missing")
            if name in found and not (private and isinstance(own[name], list)):
                check_like(own[name], found[name], f"{what}.{name}", loose=loose)
    elif isinstance(own, list | tuple):
        fits = isinstance(found, list | tuple)
        _check(fits and (loose or len(found) == len(own)), own, found, what)
        for i, (ours, theirs) in enumerate(zip(own, found, strict=not loose)):
            check_like(ours, theirs, f"{what}[{i}]", loose=loose)
    elif own is not None and not (loose and found is None):
        kinds = (int, float) if isinstance(own, int | float) else (type(own),)
        fits = isinstance(found, kinds) and isinstance(found, bool) <= isinstance(
            own, bool | float
        )
        _check(fits, own, found, what)


def _check(fits: bool, own: Any, found: Any, what: str) -> None:
    if not fits:
        raise SaveError(f"{what} is damaged: it is {_kind(found)}, not {_kind(own)}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"


@dataclass(frozen=True)
class ReplicaContext:
    """What a training master gets to make the exchange of one replica from.

    Attributes:
        module: The replica's model, on its device; its parameters are the start.
        channel: The replica's end of the run: messages, barriers and blobs.
            `docs/extending.md` lists the methods for a master of your own.
        replica: Number of the replica in the run.
        members: Numbers of all initial replicas of the run, ascending; of a replica
            that joins later only its own.
        compression: State of compression that an earlier fit left, or None.
        snapshot: What `Exchange.snapshot` of another replica returned, where this one
            joins later; else None.
        optimizer: Of the module; the exchange may change its state.
        resumed: What a checkpoint has for the exchange, or None.
        residual: Undelivered progress of an earlier fit, of all replicas together, for
            the initial ones to deliver; or None.
        untrained: The buffers, and frozen parameters that the model changes itself.
    """

    module: nn.Module
    channel: Channel
    replica: int
    members: Sequence[int] = field(default_factory=list)
    compression: CompressionState | None = None
    snapshot: Mapping[str, Any] | None = None
    optimizer: Optimizer | None = None
    resumed: Resumed | None = None
    residual: KeptResidual | None = None
    untrained: Untrained = None  # type: ignore[assignment]  # as the module is now

    def __post_init__(self) -> None:
        if self.untrained is None:
            object.__setattr__(self, "untrained", Untrained(self.module))

    @property
    def alone(self) -> bool:
        """Whether this replica starts the run alone, and goes on from nobody else."""
        resumed = self.resumed
        begins = self.snapshot is None and (resumed is None or resumed.kind == ALONE)
        return begins and len(self.members) == 1


class Exchange(ABC):
    """One replica's part in training together. Only its training thread uses it.

    Each step calls `before_step`, computes the gradients, lets the optimizer step at
    `learning_rate_scale` times its rate, and calls `after_step`. At the end of each
    sync interval (an epoch, or the time between two checkpoints in the middle of one)
    `sync` has all replicas agree. A subclass defines `after_step` and `sync`. The
    other methods have defaults, for an exchange whose only state is the model.

    Any method may raise what its calls of the channel raise:
    :class:`~daskdl.ChannelError` and :class:`~daskdl.WaitTimeoutError`. `after_step`
    and `sync` raise :class:`~daskdl.DivergedError` if there is progress that cannot be
    shared; the replica adds a diagnosis.

    Args:
        context: Of the replica. The model and buffers of a `snapshot` are loaded.

    Attributes:
        context: The same.
        learning_rate_scale: Factor on the optimizer's learning rate in the next step.
        update_scale: How much an update of this replica counts for the group; only
            messages about a fit that diverges use it.
        exchanged: Whether the last step ended with an exchange.
        averages_optimizer: Whether `sync` leaves all replicas with the same state of
            the optimizer, so that a checkpoint has it once.
    """

    kind: ClassVar[str] = MODEL  # of its states in checkpoints
    learning_rate_scale: float = 1.0
    update_scale: float = 1.0
    exchanged: bool = True
    averages_optimizer: bool = False

    def __init__(self, context: ReplicaContext) -> None:
        self.context = context
        self._stats = ExchangeStats()
        if context.snapshot is not None and MODEL in context.snapshot:
            packed: Packed[Parameters]
            packed = Packed.of(np.asarray(context.snapshot[MODEL]), MODEL)
            packed.unpack().load_into(context.module)

    def before_step(self, interval: int) -> None:  # noqa: B027
        """Wait if too far ahead, and apply what other replicas have sent.

        Args:
            interval: Number of the sync interval, from 0 over all epochs of the fit.
        """

    @abstractmethod
    def after_step(self, interval: int, examples: int) -> None:
        """Share what is due; the optimizer has just moved the parameters.

        Args:
            interval: See `before_step`.
            examples: Rows of this step.
        """

    @abstractmethod
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        """Share what is left; where the interval has ended, agree with all replicas.

        Args:
            interval: See `before_step`.
            examples: Rows this replica trained on so far in this epoch.
            ended: False: there is no data for this replica at present. More may come,
                when another replica is lost; nobody is to be waited for. True: return
                when all replicas have the same parameters and buffers.
        """

    def agreed(self) -> Parameters:
        """Copy what all replicas agree on: at the start, and when `sync` has ended.

        The default copies the module, with a checksum of its trainable parameters.
        Replicas compare checksums.
        """
        parameters = Parameters.of(self.context.module)
        return dataclasses.replace(parameters, digest=checksum_of(self.context.module))

    def showing_agreed(self) -> AbstractContextManager[None]:
        """Context manager in which the module shows the agreed parameters.

        They are validated in it, right after `sync`. The default leaves the module as
        it is.
        """
        return contextlib.nullcontext()

    def stats(self) -> ExchangeStats:
        """Counters since the last call, for the epoch's row of the history."""
        stats, self._stats = self._stats, ExchangeStats()
        return stats

    def step_stats(self) -> StepStats:
        """What the last step exchanged, for a row of `history.steps`."""
        return StepStats()

    def snapshot(self) -> dict[str, Any]:
        """Everything that a joining replica needs: plain values and arrays.

        Its exchange finds them in `ReplicaContext.snapshot`. ``"received"``, ``"grid"``
        and ``"step"`` are for its channel: updates of each replica that are in the
        snapshot, parameter units per count, and steps completed.
        """
        model = Packed(Parameters.of(self.context.module), MODEL).payload
        return {"received": [], "grid": 1.0, "step": 0, MODEL: model}

    def state(self) -> State:
        """Everything that another fit needs to go on from here, between two intervals.

        Buffers, frozen parameters and the optimizer are in the checkpoint anyway. The
        default has the trainable parameters, which are loaded before an exchange is
        made; a master names this exchange's `kind` in `TrainingMaster.resumes`.
        """
        return State(self.kind, {PARAMETERS: trained_in(self.context.module)}, {})

    def result(self) -> ExchangeResult:
        """What this replica leaves at the end of a fit, beside what is agreed."""
        return ExchangeResult()

    def leave(self) -> None:  # noqa: B027
        """Deliver what only this replica has; it leaves before the end of the fit."""


class SoloExchange(Exchange):
    """For the only replica of a run, which trains exactly as a plain PyTorch loop.

    Args:
        context: Of the replica.
        scale: Factor on the learning rate.
    """

    kind = ALONE

    def __init__(self, context: ReplicaContext, scale: float) -> None:
        super().__init__(context)
        self.learning_rate_scale = self.update_scale = scale
        self._compression = context.compression or CompressionState({}, 0)
        self._start: Parameters | None = None
        if context.residual is not None:  # there is nobody to share it with
            self._start = Parameters.of(context.module)
            context.residual.deliver_(context.module)

    @override
    def after_step(self, interval: int, examples: int) -> None:
        self._stats.steps += 1
        sent, steps = self._compression
        self._compression = CompressionState(sent, steps + 1)

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        pass

    @override
    def agreed(self) -> Parameters:  # without a digest: there is nobody to compare with
        start, self._start = self._start, None
        return start or Parameters.of(self.context.module)

    def shared_context(self) -> ReplicaContext:
        """The context of the exchange that takes over when a second replica joins."""
        return dataclasses.replace(
            self.context,
            compression=self._compression,
            residual=None,  # it is delivered by now
        )

    @override
    def state(self) -> State:
        sent, made = self._compression
        rules = {p: (s.threshold, s.density) for p, s in sent.items()}
        common = {PARAMETERS: trained_in(self.context.module), "made": made}
        return State(ALONE, {**common, "sent": rules}, {})

    @override
    def result(self) -> ExchangeResult:
        return ExchangeResult(self._compression)


class TrainingMaster(ABC):
    """A way of training: frozen, picklable, without state.

    A subclass defines `attach`. `docs/extending.md` has one of a user's own.
    """

    replicas_per_worker: int | str = 1
    min_replicas: int = 1  # with fewer, training waits for more
    rejoin_timeout: float | None = None  # how long, seconds; None: as configured
    fan_out: int = FAN_OUT  # most replicas that one passes an update on to, in a mesh
    # Kinds of the states of exchanges that a fit can resume from, see `Exchange.kind`.
    resumes: ClassVar[Collection[str]] = (ALONE, MODEL)

    @property
    def synchronous(self) -> bool:
        """Whether replicas go in step, so that a run is repeatable from its seed."""
        return False

    @property
    def solo_scale(self) -> float | None:
        """Factor on the learning rate of the only replica of a run.

        It trains as a plain PyTorch loop does until a second one joins; `attach` is
        called then. None: `attach` is called for the only replica too.
        """
        return 1.0

    @property
    def averages(self) -> bool:
        """Whether the mean of the replicas' updates counts, as of one large batch."""
        return False

    def routing_for(self, workers: int) -> str:
        """``"plain"`` or ``"mesh"``, for a run that begins on so many workers."""
        return "plain"

    def timeouts(self) -> Timeouts:
        """The configured bounds on waiting, with this one's own.

        Raises:
            OptionError: If one that is configured is not allowed.
        """
        timeouts = Timeouts.from_config()
        if self.rejoin_timeout is None:
            return timeouts
        return dataclasses.replace(timeouts, rejoin=self.rejoin_timeout)

    def check(  # noqa: B027 - most take any
        self, parameters: FlatParameters
    ) -> None:
        """Refuse a model that its options are not for; on the client.

        Raises:
            OptionError: Naming the option and the parameter.
        """

    def warm_up(  # noqa: B027 - most need not
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Run the code between steps once, on something small."""

    @abstractmethod
    def attach(self, context: ReplicaContext) -> Exchange:
        """Make the exchange of one replica, which has joined the run."""


def check_places(master: TrainingMaster) -> None:
    """Refuse how many replicas a way of training is to have, and how they are joined.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.
    """
    check_whole("replicas_per_worker", master.replicas_per_worker, 1, "auto")
    check_whole("min_replicas", master.min_replicas, 1)
    check_whole("fan_out", master.fan_out, 1)
    check_bound("rejoin_timeout", master.rejoin_timeout)
