"""The interface of a training algorithm: `TrainingMaster` and `Exchange`.

A :class:`TrainingMaster` is a frozen specification, pickled to the workers. It creates
one :class:`Exchange` per replica, which shares that replica's progress with the others.
"""

import contextlib
import copy
import dataclasses
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
from daskdl.observe.tables import StepStats
from daskdl.training.state import (
    MODEL,
    PARAMETERS,
    UNSHARED,
    ExchangeState,
    State,
    check_like,
    described,
)


@dataclass
class ExchangeStats:
    """Counters of one exchange over an epoch."""

    exchanges: int = 0
    density_sum: float = 0.0  # entries sent / parameters, summed over exchanges
    threshold: float = math.nan  # last used, parameter units; mean over groups
    clipped: float = 0.0  # mass removed by clipping, parameter units
    lead_sum: int = 0  # steps ahead of the slowest replica, summed over steps
    steps: int = 0
    rate_rise_sum: float = 0.0  # `Exchange.rate_factor` - 1, summed over steps
    frozen_bytes: int = 0  # frozen parameters sent at the last sync


def trained_in(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name, as views.

    Example:
        >>> list(trained_in(nn.BatchNorm1d(2)))
        ['weight', 'bias']
    """
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def largest_in(module: nn.Module) -> float:
    """Return the largest absolute value of all trainable parameters; NaN if any is NaN.

    Example:
        >>> largest_in(nn.LayerNorm(2))
        1.0
    """
    parameters = [p for p in trained_in(module).values() if p.numel()]
    largest = [float(end.abs()) for p in parameters for end in p.aminmax()]
    return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)


def others_in(module: nn.Module) -> dict[str, Tensor]:
    """Return frozen parameters and buffers by name, as views.

    Example:
        >>> list(others_in(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    return {n: t.detach() for n, t in (*frozen.items(), *module.named_buffers())}


def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of the same shapes into a module; some may be missing."""
    targets = {**trained_in(module), **others_in(module)}
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def evaluating_in(
    module: nn.Module, otherwise: Collection[str] = ()
) -> Collection[str]:
    """Return the paths of the submodules that training leaves in evaluation mode.

    These are the submodules in evaluation mode, such as a frozen backbone. If the whole
    module is in evaluation mode, the choice is unknown, and the result is `otherwise`.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
        >>> evaluating_in(model), evaluating_in(model.eval())
        (['0'], ())
    """
    parts = dict(module.named_modules())
    paths = [path for path, part in parts.items() if not part.training]
    return otherwise if len(paths) == len(parts) else paths


def train_(module: nn.Module, evaluating: Collection[str]) -> nn.Module:
    """Set training mode, except for the submodules at the paths in `evaluating`.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        >>> [part.training for part in train_(model, ["0"])]
        [False, True]
    """
    module.train()  # which a class may override, to freeze its batch norm for example
    parts = dict(module.named_modules())
    for path in evaluating:
        parts[path].training = False
    return module


@dataclass
class Parameters:
    """A replica's parameters and buffers, either `exact` or as counts in `shared_N`.

    Attributes:
        exact: State dict of one replica's module, on the CPU, or None.
        shared_N: Parameters agreed on by all replicas, int32, steps of `grid`, or None.
        grid: Parameter units per step.
        untrained: With `shared_N`, averaged buffers and the frozen parameters that the
            model has changed; see `Untrained`.
        hidden: With `exact`, buffers that are not in the state dict, by name.
        digest: Checksum of the state that is equal on all replicas after a sync point.
    """

    exact: Mapping[str, Any] | None = None
    shared_N: NDArray[np.int32] | None = None
    grid: float = 0.0
    untrained: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    digest: int = 0

    def __bool__(self) -> bool:
        """Whether parameters are present."""
        return self.exact is not None or self.shared_N is not None

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """Copy a module's tensors to the CPU; tied tensors stay tied on loading."""
        state, buffers = module.state_dict(), module.named_buffers()
        hidden = {name: value for name, value in buffers if name not in state}
        kept = [{n: v.cpu() for n, v in part.items()} for part in (state, hidden)]
        exact, hidden = copy.deepcopy(kept)
        return cls(exact=exact, hidden=hidden)

    def values(self) -> dict[str, Any]:
        """Convert to plain values and tensors."""
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
        """Create from the result of `values`."""
        if "shared" not in values:
            return cls(exact=values["exact"], hidden=values["hidden"])
        untrained = {n: tensor.numpy() for n, tensor in values["untrained"].items()}
        shared_N, grid = values["shared"].numpy(), values["grid"]
        return cls(None, shared_N, grid, untrained)

    def load_into(self, module: nn.Module) -> None:
        """Load into a module; do nothing if no parameters are present."""
        if self.exact is not None:
            _make_room_(module, self.exact, self.hidden)
            module.load_state_dict(self.exact)
            buffers = dict(module.named_buffers())
            for name in buffers.keys() & self.hidden.keys():
                buffers[name].copy_(self.hidden[name])
        elif self.shared_N is not None:
            load_counts_(module, self.shared_N, self.grid)
            load_untrained_(module, self.untrained)


def _make_room_(
    module: nn.Module, exact: Mapping[str, Any], hidden: Mapping[str, Tensor]
) -> None:
    """Register, replace and remove buffers, so that the tensors can be loaded."""
    tensors = {**exact, **hidden}
    for prefix, part in module.named_modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            new = tensors.get(f"{prefix}.{leaf}" if prefix else leaf)
            if new is not None and _form(new) != _form(buffer):
                setattr(part, leaf, torch.empty_like(new))
    buffers = dict(module.named_buffers())
    for name in buffers.keys() - tensors.keys():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, None)
    # State dict names may differ from those of parameters and buffers.
    for name in tensors.keys() - {*buffers, *module.state_dict()}:
        path, _, leaf = name.rpartition(".")
        # A tensor with no place in the module is skipped, or refused on loading.
        with contextlib.suppress(AttributeError, KeyError):
            new = torch.empty_like(tensors[name])
            module.get_submodule(path).register_buffer(leaf, new, name in exact)


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def share_of(
    counts_N: NDArray[np.int32], place: int, replicas: int
) -> NDArray[np.int32]:
    """Return one replica's share of counts; all shares sum exactly to the counts.

    Args:
        counts_N: Counts to share.
        place: Index of the replica among all, from 0. The first replicas get the
            remainder of the division.
        replicas: Number of replicas.

    Example:
        >>> counts_N = np.array([5, -5], np.int32)
        >>> [share_of(counts_N, place, replicas=2).tolist() for place in (0, 1)]
        [[3, -2], [2, -3]]
    """
    whole_N, left_N = np.divmod(counts_N, np.int32(replicas))
    return whole_N + (left_N > place)


def deliver_(module: nn.Module, carried: State) -> None:
    """Add the whole residual of an earlier fit to a module's parameters."""
    load_counts_(module, carried["residual"].numpy(), carried["grid"], add=True)


def checksum_of(module: nn.Module) -> int:
    """Return a CRC-32 of the trainable parameters, on any device.

    Of their names, dtypes, shapes and values, in order.
    """
    checksum = 0
    for name, tensor in trained_in(module).items():
        checksum = zlib.crc32(f"{name} {described(tensor)}".encode(), checksum)
        octets = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(octets.numpy().data, checksum)
    return checksum


@dataclass(frozen=True)
class ReplicaContext:
    """Arguments from which a training master creates one replica's exchange.

    Attributes:
        module: The replica's model on its device, with the initial parameters.
        channel: The replica's end of the run: messages, barriers and blobs.
            `docs/extending.md` lists the methods for custom masters.
        replica: Number of the replica in the run.
        members: Numbers of all initial replicas, ascending; for a joining replica only
            its own.
        joins: Whether the replica joins a run that others have begun.
        optimizer: Optimizer of the module; the exchange may change its state.
        untrained: The buffers, and the frozen parameters that the model itself changes.
    """

    module: nn.Module
    channel: Channel
    replica: int
    members: Sequence[int] = field(default_factory=list)
    joins: bool = False
    optimizer: Optimizer | None = None
    untrained: Untrained = None  # type: ignore[assignment]  # from `module`

    def __post_init__(self) -> None:
        if self.untrained is None:
            object.__setattr__(self, "untrained", Untrained(self.module))


class Exchange(ABC):
    """One replica's side of distributed training, used only by its training thread.

    Each step calls `before_step`, computes the gradients, runs the optimizer at
    `learning_rate_scale` and `rate_factor` times its learning rate, and calls
    `after_step`. `sync` makes
    all replicas agree at the end of each sync interval, which is an epoch, or the part
    of an epoch between two checkpoints. Subclasses define `after_step` and `sync`. The
    other methods have defaults for an exchange whose only state is the model.

    Any method may raise the errors of its channel calls:
    :class:`~daskdl.ChannelError` and :class:`~daskdl.WaitTimeoutError`. `after_step`
    and `sync` raise :class:`~daskdl.DivergedError` if progress cannot be shared; the
    replica adds a diagnosis.

    Args:
        context: Context of the replica, whose module has the parameters to start from.

    Attributes:
        context: The context passed in.
        learning_rate_scale: Factor on the optimizer's learning rate in the next step.
        rate_factor: The same, but decoupled weight decay stays as it is.
        update_scale: Weight of this replica's updates in the group; used only in
            divergence messages.
        adds_up: Whether `update_scale` is 1 because replicas rarely change the same
            rows of embeddings; used only in divergence messages.
        momentum: Part of its updates that it sends again; used only in divergence
            messages.
        exchanged: Whether the last step ended with an exchange.
        averages_optimizer: Whether `sync` gives all replicas the same optimizer state,
            so that a checkpoint stores it once.
    """

    kind: ClassVar[str] = MODEL  # kind of its checkpointed states
    learning_rate_scale: float = 1.0
    rate_factor: float = 1.0
    update_scale: float = 1.0
    adds_up: bool = False
    momentum: float = 0.0
    exchanged: bool = True
    averages_optimizer: bool = False

    def __init__(self, context: ReplicaContext) -> None:
        self.context = context
        self._stats = ExchangeStats()

    def before_step(self, interval: int) -> None:  # noqa: B027
        """Wait if too far ahead, then apply the updates of other replicas.

        Args:
            interval: Number of the sync interval, from 0 over all epochs of the fit.
        """

    @abstractmethod
    def after_step(self, interval: int, examples: int) -> None:
        """Share progress if due; called right after the optimizer step.

        Args:
            interval: See `before_step`.
            examples: Rows of this step.
        """

    @abstractmethod
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        """Share remaining progress; at the end of an interval, agree with all replicas.

        Args:
            interval: See `before_step`.
            examples: Rows this replica has trained on in this epoch.
            ended: False: this replica has no data at present, but may take over the
                leases of a failed replica; do not wait for the end of the interval.
                True: return when all replicas agree on parameters and buffers, see
                `agreed`; their own parameters may still differ.
        """

    def agreed(self) -> Parameters:
        """Copy the agreed state; called at the start and after `sync`.

        The default copies the module and computes a checksum of its trainable
        parameters. Replicas compare checksums.
        """
        parameters = Parameters.of(self.context.module)
        return dataclasses.replace(parameters, digest=checksum_of(self.context.module))

    def showing_agreed(self) -> AbstractContextManager[None]:
        """Context manager in which the module has the agreed parameters.

        Validation runs in it, right after `sync`. The default leaves the module
        unchanged.
        """
        return contextlib.nullcontext()

    def stats(self) -> ExchangeStats:
        """Return the counters since the last call, for the epoch's row of `history`."""
        stats, self._stats = self._stats, ExchangeStats()
        return stats

    def step_stats(self) -> StepStats:
        """Return measurements of the last step, for a row of `history.steps`."""
        return StepStats()

    def residual_norms(self) -> Mapping[str, float]:
        """Return the norm of each parameter's residual, for rows of `history.layers`.

        Called after `after_step`, in steps that are sampled. The Euclidean norms,
        parameter units, by name of the parameter; the default has none.
        """
        return {}

    def admit(self) -> dict[str, Any]:
        """Prepare for a joining replica, which starts from the present `state`.

        Returns:
            Plain values for its channel: ``"received"``, the updates of each replica
            that the state includes, see `ReceivedSet.by_origin`; ``"grid"``, parameter
            units per count; ``"step"``, steps completed.
        """
        return {"received": {}, "grid": 1.0, "step": 0}

    def state(self) -> ExchangeState:
        """Return the state for `load_`, of plain values and tensors.

        Buffers, frozen parameters and the optimizer are carried separately. The default
        returns the trainable parameters. To resume checkpoints of a `kind` of exchange,
        `TrainingMaster.resumes` must list it.
        """
        return ExchangeState({PARAMETERS: trained_in(self.context.module)}, {})

    def load_(  # noqa: B027 - the module already has the parameters
        self, common: State, per_replica: Sequence[State]
    ) -> None:
        """Continue from a `state`; called once, before the first step.

        Args:
            common: Common state, of this `kind` of exchange or of a run's only replica,
                or what replicas of an earlier fit have `carried`. The module already
                has its ``"parameters"``.
            per_replica: States of the replicas that this one continues for: in a
                resumed fit one, several or none; for a joining replica none.
        """

    def carried(self, *, ended: bool) -> State:
        """Return what the next fit starts from, beside the agreed parameters.

        Args:
            ended: Whether to include the residual. False if the fit has not ended, or
                ends with the parameters of the best epoch.

        Returns:
            ``"steps_made"``, the steps over all fits; ``"sent"``, threshold and density
            of the last exchange by pattern; perhaps ``"residual"``, int32 in steps of
            ``"grid"``, which is summed over all replicas for the next fit.
        """
        return {"steps_made": 0, "sent": {}}

    def leave(self) -> None:  # noqa: B027
        """Deliver unshared progress; the replica leaves before the end of the fit."""


class SoloExchange(Exchange):
    """Exchange of a run's only replica, which trains like a plain PyTorch loop."""

    kind = UNSHARED

    def __init__(self, context: ReplicaContext, scale: float) -> None:
        super().__init__(context)
        self.learning_rate_scale = self.update_scale = scale
        self._steps_made, self._sent = 0, dict[str, Any]()
        # The parameters before the carried residual was added: `agreed` returns them
        # once, as a fit that fails early carries the residual again.
        self._start: Parameters | None = None

    @override
    def after_step(self, interval: int, examples: int) -> None:
        self._stats.steps += 1
        self._steps_made += 1

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        pass

    @override
    def agreed(self) -> Parameters:  # no digest: there is no replica to compare with
        start, self._start = self._start, None
        return start or Parameters.of(self.context.module)

    @override
    def state(self) -> ExchangeState:
        parameters = {PARAMETERS: trained_in(self.context.module)}
        return ExchangeState({**parameters, **self.carried(ended=False)}, {})

    @override
    def load_(self, common: State, per_replica: Sequence[State]) -> None:
        check_like({"steps_made": 0, "sent": {}}, common, "exchange")
        self._steps_made, self._sent = common["steps_made"], common["sent"]
        if "residual" in common:  # there is no replica to share it with
            self._start = Parameters.of(self.context.module)
            deliver_(self.context.module, common)

    @override
    def carried(self, *, ended: bool) -> State:
        return {"steps_made": self._steps_made, "sent": self._sent}


class TrainingMaster(ABC):
    """A training algorithm: frozen, picklable and stateless.

    Subclasses define `attach`; `docs/extending.md` has an example.
    """

    replicas_per_worker: int | str = 1
    min_replicas: int = 1  # training waits while there are fewer
    rejoin_timeout: float | None = None  # seconds of this wait; None: as configured
    fan_out: int = FAN_OUT  # most replicas that a replica forwards to, in a mesh
    # Kinds of exchange states that a fit can resume from, see `Exchange.kind`.
    resumes: ClassVar[Collection[str]] = (UNSHARED, MODEL)

    @property
    def synchronous(self) -> bool:
        """Whether replicas run in lockstep, so that a seed makes runs reproducible."""
        return False

    @property
    def solo_scale(self) -> float | None:
        """Factor on the learning rate of a run's only replica.

        The only replica trains like a plain PyTorch loop until a second one joins;
        `attach` is called then. None: `attach` is called for the only replica too.
        """
        return 1.0

    def routing_for(self, workers: int) -> str:
        """Return a name of `ROUTINGS`, for the number of workers at the start."""
        return "plain"

    def timeouts(self) -> Timeouts:
        """Return the configured timeouts, overridden by `rejoin_timeout`.

        Raises:
            OptionError: If a configured timeout is not allowed.
        """
        timeouts = Timeouts.from_config()
        if self.rejoin_timeout is None:
            return timeouts
        return dataclasses.replace(timeouts, rejoin=self.rejoin_timeout)

    def check(  # noqa: B027 - most masters accept any model
        self, parameters: FlatParameters
    ) -> None:
        """Check on the client that the options fit the model.

        Raises:
            OptionError: If they do not; names the option and the parameter.
        """

    def warm_up(  # noqa: B027 - most masters need no warm-up
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Run the code between steps once on small tensors, before the first step."""

    @abstractmethod
    def attach(self, context: ReplicaContext) -> Exchange:
        """Create the exchange of a replica that has joined the run."""


def check_places(master: TrainingMaster) -> None:
    """Check a master's options on replicas, fan-out and rejoining."""
    check_whole("replicas_per_worker", master.replicas_per_worker, 1, "auto")
    check_whole("min_replicas", master.min_replicas, 1)
    check_whole("fan_out", master.fan_out, 1)
    check_bound("rejoin_timeout", master.rejoin_timeout)
