"""Synchronous training: replicas average their parameters every few steps."""

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import FAN_OUT, Arrays, Barrier, Routes
from daskdl.codec import Stamp
from daskdl.compression.flat import FlatParameters, Frozen
from daskdl.config import check_whole
from daskdl.errors import OptionError
from daskdl.training.base import (
    ALONE,
    AVERAGER,
    PARAMETERS,
    CompressionState,
    Exchange,
    ExchangeResult,
    ExchangeStats,
    KeptResidual,
    ReplicaContext,
    Resumed,
    State,
    StepStats,
    TrainingMaster,
    check_places,
    restoring,
    trained_in,
)
from daskdl.training.telemetry import Averagings
from daskdl.training.tree_reduce import (
    PARAMETER_ARRAYS,
    Differences,
    Feedback,
    Outer,
    Reduction,
    Shares,
    Terms,
    Whole,
    is_linear,
    read,
    rounded,
)


class Said(NamedTuple):
    """What one replica says when it comes to a meeting."""

    seen: int  # number of the last meeting it was at
    mean: int  # number of the meeting whose mean it began from, -1: none
    examples: int  # trained on since
    ended: bool = False  # it has nothing left to do in this epoch
    parked: bool = False  # it is not there, but waits for a lease
    digest: int = 0  # of its parameters, if `ended`
    rests: bool = False  # there is nothing for it to train on at present
    owes: bool = False  # rounding has left something that is in no mean yet


@dataclass(frozen=True)
class Round:
    """One meeting, decided.

    Attributes:
        number: Of the meeting.
        latest: Number of the last mean that anybody has.
        weights: Of those whose models are averaged; their sum is 1. Empty: there is
            nothing to average.
        members: That get the new mean, ascending, if there is one.
        current: That have the latest mean, ascending.
        donors: Of those, who let others fetch it, ascending.
        whole: The mean is to be exact, and of all there is: because it will be the
            last of an epoch, or somebody has nothing in common with the others.
        settles: Nobody has trained since the latest mean, and all have ended: it is
            only completed by what rounding has left.
        over: All have ended, and have the same.
    """

    number: int
    latest: int
    weights: Mapping[int, float]
    members: tuple[int, ...]
    current: tuple[int, ...]
    donors: tuple[int, ...]
    whole: bool
    settles: bool
    over: bool

    @property
    def root(self) -> int:
        """Where the mean is made: a member that has the latest one."""
        there = [replica for replica in self.members if replica in self.current]
        return there[self.number % len(there)]


def round_of(notes: Mapping[int, Any], gone: Collection[int]) -> Round:
    """Decide what is done at a meeting.

    A mean counts what all who were there had trained. Whoever has not got it, because
    the one that was to pass it on was lost, has nothing to add to the next one; if
    nobody has got it, all still have what they had trained.

    Args:
        notes: Of each replica, the fields of `Said`.
        gone: Replicas that were lost, whatever they had said.

    Example:
        >>> said = {0: Said(4, 4, 60), 1: Said(4, 4, 20), 2: Said(4, 3, 20)}
        >>> decided = round_of(said, gone=[])
        >>> decided.number, decided.weights, decided.members
        (5, {0: 0.75, 1: 0.25}, (0, 1, 2))
    """
    here = {r: Said(*notes[r]) for r in sorted(notes) if r not in gone}
    latest = max(said.mean for said in here.values())
    current = [r for r, said in here.items() if said.mean == latest]
    ended = all(said.ended for said in here.values())
    if ended:
        same = here[current[0]].digest
        current = [r for r in current if here[r].digest == same]
    members = tuple(r for r, said in here.items() if not said.parked)
    trained = {r: here[r].examples for r in current if not here[r].parked}
    total = sum(trained.values())
    settles = ended and not total and any(said.owes for said in here.values())
    weights = {r: n / total for r, n in trained.items() if n} if total else {}
    decided = Round(
        number=1 + max(said.seen for said in here.values()),
        latest=latest,
        weights=weights,
        members=members,
        current=tuple(current),
        donors=tuple(r for r in current if not here[r].examples),
        whole=all(here[r].ended or here[r].rests for r in members)
        or latest < 0
        or len(members) < 2
        or not set(members) <= set(current),
        settles=settles,
        over=ended and not total and not settles and len(current) == len(here),
    )
    # All have the same; the root's need not travel up.
    return replace(decided, weights={decided.root: 1.0}) if settles else decided


OUTER = "outer"  # the outer optimizer's state, among the arrays
# Before the names of what is one replica's own.
COMMON, RESIDUAL = "common ", "residual "


class ReplicaState:
    """A replica's module, its optimizer if that is averaged, and its outer optimizer.

    Args:
        module: Its parameters' memory is replaced, see `FlatParameters`.
        optimizer: Of the module; None: it is not averaged.
        outer: Makes the outer optimizer; None: there is none.
        compressed: Whether rounded differences are averaged.
        frozen: What the module changes itself; None: from now on.

    Attributes:
        averages_optimizer: Whether the optimizer is among what is averaged.
        feedback: What rounding has left.
    """

    averages_optimizer: bool
    feedback: Feedback

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        outer: Callable[[Any], Optimizer] | None,
        *,
        compressed: bool = False,
        frozen: Frozen | None = None,
    ) -> None:
        self.feedback = Feedback()
        self._groups = FlatParameters(module).groups
        self._shares = Shares(module, self._groups, optimizer, frozen)
        self.averages_optimizer = optimizer is not None
        self._outer = None if outer is None else Outer(outer, module)
        self._compressed = compressed
        self._common: Arrays | None = None

    def depart_(self) -> None:
        """Before a step: what is here after a mean, or at the start, is what all have.

        With compression a copy of it is kept; a second call changes nothing.
        """
        if self._compressed and self._common is None:
            arrays = self._shares.take(1.0)
            self._common = {name: a for name, a in arrays.items() if is_linear(name)}

    def terms(self, stamp: Stamp, *, whole: bool) -> Terms:
        """This replica's part in a mean.

        Args:
            stamp: Of frames; its sequence is the number of the mean.
            whole: Nothing is to be rounded.
        """
        if whole or not self._compressed:
            return Whole(self._shares, self.feedback, stamp.sequence)
        self.depart_()  # it may have made no step since
        common = self._common or {}
        return Differences(self._shares, common, self.feedback, stamp)

    def whole(self) -> Arrays:
        """All that another replica needs to have the same; new arrays."""
        return self.complete(self._shares.take(1.0))

    def complete(self, arrays: Arrays) -> Arrays:
        """Add what those need that were not at the last mean."""
        if self._outer is None:
            return arrays
        return {**arrays, OUTER: self._outer.state()}

    def residual_norm(self) -> float:
        """Length of what rounding has left of the parameters; NaN where none is."""
        if not self._compressed:
            return math.nan
        left = self.feedback.residual.items()
        parts = [a.reshape(-1) for name, a in left if PARAMETER_ARRAYS in name]
        return math.sqrt(sum(float(np.dot(part, part)) for part in parts))

    def local(self) -> Arrays:
        """What compression has beside `whole`, not to be changed; else nothing.

        What all had after the last mean, if there were steps since, and what rounding
        has left here. At the end of an epoch there is neither.
        """
        common = {f"{COMMON}{name}": a for name, a in (self._common or {}).items()}
        left = {f"{RESIDUAL}{name}": a for name, a in self.feedback.residual.items()}
        return {**common, **left}

    def restore_local_(self, local: Arrays) -> None:
        """Go on with what `local` returned, after `load_`.

        Residuals of replicas that are no more may be added to that of any other.
        """
        self._common = _named(local, COMMON) or None
        self.feedback.restore_(_named(local, RESIDUAL))

    def load_(self, whole: Arrays) -> None:
        """Take over another replica's state."""
        self._shares.load_(whole)
        if self._outer is not None:
            self._outer.load_(whole[OUTER])
        self._common = None

    def take_mean_(self, mean: Arrays, *, step: bool = True) -> None:
        """Go on from a mean, or from the outer step towards it.

        Args:
            mean: Of all.
            step: Whether there is to be an outer step; else the outer optimizer takes
                the mean for what all have in common.
        """
        self._shares.load_(mean)
        if self._outer is not None:
            if OUTER in mean:
                self._outer.load_(mean[OUTER])
            if step:
                self._outer.step_()
            else:
                self._outer.follow_()
        self._common = None

    def outer(self) -> dict[str, Any] | None:
        """What the outer optimizer goes on from; None without one."""
        return None if self._outer is None else self._outer.values()

    def restore_outer_(self, values: Mapping[str, Any]) -> None:
        """Go on from what `outer` made, if there still is an outer optimizer."""
        if self._outer is not None:
            self._outer.restore_(values)

    def deliver_(self, residual: KeptResidual, module: nn.Module) -> None:
        """Begin with all that an earlier fit has kept; so does every other founder.

        Args:
            residual: That it has kept.
            module: The replica's own.
        """
        residual.deliver_(module)
        if self._outer is not None:
            self._outer.follow_()

    def digest(self) -> int:
        """A CRC-32 of the parameters."""
        checksum = 0
        for group in self._groups:
            flat = group.flat.detach().cpu().view(torch.uint8)
            checksum = zlib.crc32(flat.numpy().data, checksum)
        return checksum


def _named(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


MEETING = "average"  # key of the barrier, of one round after the other
STATE = "state "  # before the names of a snapshot's arrays


class Averager(Exchange):
    """One replica's part in averaging.

    Args:
        context: Of the replica.
        state: Of the replica there.
        frequency: Steps between two averagings.
        fan_out: Of the tree along which means are made.
        made: Steps made before.
    """

    kind = AVERAGER

    def __init__(
        self,
        context: ReplicaContext,
        state: ReplicaState,
        frequency: int,
        fan_out: int,
        made: int,
    ) -> None:
        self.context = context
        self._module = context.module
        self._channel = context.channel
        self._replica = context.replica
        self._frequency = frequency
        self._fan_out = fan_out
        self._state = state
        self._said = Said(seen=0, mean=0, examples=0)
        self._since = 0  # steps since the last mean
        self._frozen = context.frozen
        self._behind = False  # others may have a later mean
        self._made = made
        self._done = Averagings()
        self.exchanged = False
        if context.snapshot is not None:
            self._begin(context.snapshot)
        if context.resumed is not None and context.resumed.kind == AVERAGER:
            self._resume(context.resumed)
        self.averages_optimizer = state.averages_optimizer
        self.keep_agreed()
        if context.residual is not None:
            state.deliver_(context.residual, context.module)

    def _begin(self, snapshot: Mapping[str, Any]) -> None:
        # What a replica was doing when it was asked. The common state is fetched
        # before the first step; this counts if nobody is left by then.
        names = [name for name in snapshot if name.startswith(STATE)]
        self._state.load_({name.removeprefix(STATE): snapshot[name] for name in names})
        self._made = snapshot["step"]
        self._said = Said(seen=0, mean=-1, examples=0)
        self._behind = True

    def _resume(self, resumed: Resumed) -> None:
        common = resumed.common
        resumed.check(State(AVERAGER, {"outer": None, "made": 0, "met": 0}, {}))
        with restoring(f"{resumed.common_at}: exchange.outer"):
            if common["outer"] is not None:
                self._state.restore_outer_(common["outer"])
        self._made = common["made"]
        # The number of a meeting says along which tree its mean is made.
        self._said = Said(seen=common["met"], mean=common["met"], examples=0)

    @override
    def before_step(self, interval: int) -> None:
        self._done.begin_step()
        while self._behind:
            latest = self._meet().latest
            self._behind = self._said.mean < latest
        self._state.depart_()

    @override
    def after_step(self, interval: int, examples: int) -> None:
        self._made += 1
        self._frozen.after_step()
        self._done.stepped()
        self._since += 1
        examples += self._said.examples
        self._said = self._said._replace(examples=examples, rests=False)
        self.exchanged = self._since == self._frequency
        if self.exchanged:
            self._average_all()

    def _average_all(self) -> None:
        """Meet until what was trained here is in a mean."""
        while self._said.examples:
            self._meet()
        self._channel.progress(self._made)

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        if not ended:
            self._rest()
            return
        while not self._meet(ended=True).over:
            pass
        self._behind = False
        self.keep_agreed()
        self._channel.progress(self._made, interval)

    def _rest(self) -> None:
        self._frozen.look()  # after the last step of a lap too: its mean is made now
        self._said = self._said._replace(rests=True)
        self._average_all()
        self._offer_state()
        self._channel.set_idle(_note(self._said._replace(parked=True)))
        self._behind = True

    def _meet(self, *, ended: bool = False) -> Round:
        """Come together once, and do what is to be done there."""
        digest = self.digest() if ended else 0
        owes = bool(self._state.feedback.residual)
        self._said = self._said._replace(ended=ended, digest=digest, owes=owes)
        if not self._said.examples:
            self._offer_state()
        kind = Barrier.AGREE if ended else Barrier.ROUND
        with self._done.waiting:
            gathered = self._channel.barrier(MEETING, _note(self._said), kind)
        if self._replica in gathered.gone:
            raise Stopped("the others have gone on without this replica")
        said = {r: note["said"] for r, note in gathered.payloads.items()}
        decided = round_of(said, gathered.gone)
        # By now everybody has fetched what was offered for the meeting before.
        self._channel.drop_blobs(keep=self._state_name)
        self._said = self._said._replace(seen=decided.number)
        self._state.feedback.settle_(decided.latest)
        if decided.weights:
            self._average(decided)
        elif self._replica not in decided.current:
            self._fetch_state(decided)
        return decided

    def _average(self, decided: Round) -> None:
        stamp = Stamp(self._channel.run, self._replica, decided.number, self._made)
        terms = self._state.terms(stamp, whole=decided.whole)
        routes = Routes(decided.number, decided.members, self._fan_out)
        reduction = Reduction(self._channel, routes, decided.root, self._replica)

        def finish(total: Arrays) -> Arrays:
            late = set(decided.members) - set(decided.current)
            return self._state.complete(total) if late else total

        own = terms.own(decided.weights.get(self._replica))
        result = reduction.result(own, terms.add, finish)
        if result is not None:
            anew = not decided.settles
            self._done.averaged(terms.kind, terms.sent_bytes, anew=anew)
            self._state.take_mean_(terms.mean(result), step=anew)
            self._has(decided.number)

    def _has(self, mean: int) -> None:
        self._said = self._said._replace(mean=mean, examples=0)
        self._since = 0
        self._state.feedback.settle_(mean)

    @property
    def _state_name(self) -> str:
        return f"state {self._said.mean}"

    def _offer_state(self) -> None:
        self._channel.publish_blob(self._state_name, self._state.whole())

    def _fetch_state(self, decided: Round) -> None:
        start = self._replica % len(decided.donors)
        for donor in decided.donors[start:] + decided.donors[:start]:
            state = self._channel.fetch_blob(donor, f"state {decided.latest}")
            if state is not None:
                self._state.load_(state)
                self._has(decided.latest)
                return

    @override
    def digest(self) -> int:
        return self._state.digest()

    @override
    def stats(self) -> ExchangeStats:
        return self._done.statistics()

    @override
    def step_stats(self) -> StepStats:
        if not self.exchanged:
            return StepStats(wait_s=self._done.waiting.seconds)
        return self._done.exchanged(self._state.residual_norm())

    @override
    def snapshot(self) -> dict[str, Any]:
        whole = self._state.whole()
        state = {f"{STATE}{name}": array for name, array in whole.items()}
        return {"received": [], "grid": 1.0, "step": self._made, **state}

    @override
    def state(self) -> State:
        common = {
            PARAMETERS: trained_in(self._module),
            "outer": self._state.outer(),
            "made": self._made,
            "met": self._said.seen,
        }
        return State(AVERAGER, common, {})

    @override
    def result(self) -> ExchangeResult:
        return ExchangeResult(self.agreed, CompressionState({}, self._made))


def _note(said: Said) -> dict[str, list[int]]:
    return {"said": list(said)}


@dataclass(frozen=True)
class ParameterAveraging(TrainingMaster):
    """Average the replicas' models every few steps.

    With `frequency` 1 and plain SGD, k replicas with batches of b rows make the steps
    of one process with batches of k x b. A replica that is lost costs at most what it
    had trained since the last mean; the others average without it.

    Args:
        frequency: Steps of each replica between two averagings, >= 1.
        average_optimizer: Average the optimizer's state too; else each replica keeps
            its own, and the trainer gets their weighted mean at the end.
        outer: Makes a `torch.optim.Optimizer` from a list of parameters; it takes the
            way from the last common parameters to their mean for a gradient. With
            SGD, learning rate 0.7 and Nesterov momentum 0.9, this is DiLoCo. None: the
            mean itself is taken.
        compression: "dense8": what travels are differences to the last common
            parameters, in eight bits for each; what rounding leaves is sent with the
            next mean, and whole at the end of an epoch. None: 32 bits.
        replicas_per_worker: See `GradientSharing`.
        min_replicas: Likewise.
        rejoin_timeout: Likewise.
        fan_out: Most replicas whose models one adds up, >= 1. Means are made along a
            tree from worker to worker.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> ParameterAveraging(frequency=0)
        Traceback (most recent call last):
        daskdl.errors.OptionError: frequency must be a whole number >= 1, got 0

    Source:
        Deeplearning4j, ParameterAveragingTrainingMaster.java, whose mean is not
        weighted; Douillard and others, "DiLoCo", 2023.
    """

    frequency: int = 5
    average_optimizer: bool = True
    outer: Callable[[Any], Optimizer] | None = None
    compression: Literal["dense8"] | None = None
    replicas_per_worker: int | Literal["auto"] = 1
    min_replicas: int = 1
    rejoin_timeout: float | None = None
    fan_out: int = FAN_OUT
    resumes: ClassVar = (ALONE, AVERAGER)

    def __post_init__(self) -> None:
        check_whole("frequency", self.frequency, 1)
        if not isinstance(self.average_optimizer, bool):
            raise OptionError(
                f"average_optimizer must be True or False, got "
                f"{self.average_optimizer!r}"
            )
        if self.outer is not None and not callable(self.outer):
            raise OptionError(
                "outer must be a function that makes an optimizer from parameters, "
                f"such as lambda params: torch.optim.SGD(params, lr=0.7), or None; got "
                f"{self.outer!r}"
            )
        if self.compression is not None and self.compression != "dense8":
            raise OptionError(
                f"compression must be 'dense8' or None, got {self.compression!r}"
            )
        check_places(self)

    @property
    @override
    def synchronous(self) -> bool:
        return True

    @override
    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.compression is not None:
            read(rounded({"": np.ones(512, np.float32)}, Stamp(0, 0, 1, 1)).sent)

    @property
    @override
    def solo_scale(self) -> float | None:
        return 1.0 if self.outer is None else None

    @override
    def attach(self, context: ReplicaContext) -> Exchange:
        made = 0 if context.compression is None else context.compression.steps
        state = ReplicaState(
            context.module,
            context.optimizer if self.average_optimizer else None,
            self.outer,
            compressed=self.compression is not None,
            frozen=context.frozen,
        )
        return Averager(context, state, self.frequency, self.fan_out, made)
