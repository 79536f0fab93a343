"""Synchronous training: replicas average their parameters every few steps.

Replicas vote at barriers, and all derive the same decision for each round from the
votes; means are computed by :mod:`daskdl.training.tree_reduce`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch.optim import Optimizer
from typing_extensions import override

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import FAN_OUT, BarrierKind, MeshTopology
from daskdl.codec import Stamp
from daskdl.config import check_flag, check_whole
from daskdl.errors import OptionError
from daskdl.observe.tables import StepStats
from daskdl.training.base import (
    Exchange,
    Parameters,
    ReplicaContext,
    TrainingMaster,
    check_places,
    checksum_of,
    deliver_,
    trained_in,
)
from daskdl.training.state import (
    AVERAGING,
    PARAMETERS,
    UNSHARED,
    ExchangeState,
    State,
    check_like,
)
from daskdl.training.tree_reduce import (
    Key,
    ReduceOp,
    ReduceState,
    TreeMean,
    from_blob,
    to_blob,
)


class Vote(NamedTuple):
    """A replica's vote at the barrier of a round."""

    last_round: int  # number of the last round the replica took part in
    mean_round: int  # number of the round whose mean the replica has; -1: none
    examples: int  # trained on since this mean
    ended: bool = False  # the sync interval has ended for the replica
    parked: bool = False  # absent from the round, waiting for a lease
    digest: int = 0  # checksum of the parameters, if `ended`
    rests: bool = False  # no data to train on at present
    owes: bool = False  # the replica has a residual from rounding

    def to_wire(self) -> dict[str, list[int]]:
        """Return the vote as plain values."""
        return {"vote": list(self)}

    @classmethod
    def by_replica(cls, notes: Mapping[int, Any]) -> dict[int, "Vote"]:
        """Create the votes of all replicas from results of `to_wire`."""
        return {replica: cls(*note["vote"]) for replica, note in notes.items()}


@dataclass(frozen=True)
class RoundDecision:
    """The decision of one round, which all replicas derive from the same votes.

    Attributes:
        number: Number of the round.
        latest: Number of the latest mean that any replica has.
        weights: Weights of the replicas whose models are averaged, with sum 1; empty:
            no mean is computed.
        members: Replicas that take part and get the mean, if there is one, ascending.
        current: Replicas that have the latest mean, ascending.
        donors: Replicas in `current` that serve the latest mean to others, ascending.
        exact: Whether the mean has no rounding: when all members have ended
            or have no data, a member lacks the latest mean, or there is one member.
        settles: Whether all replicas have ended and none has trained since the latest
            mean; the round only adds the residuals to it.
        over: Whether all replicas have ended with the same parameters.
    """

    number: int
    latest: int
    weights: Mapping[int, float]
    members: tuple[int, ...]
    current: tuple[int, ...]
    donors: tuple[int, ...]
    exact: bool
    settles: bool
    over: bool

    @property
    def root(self) -> int:
        """The member that computes the mean; it has the latest one."""
        there = [replica for replica in self.members if replica in self.current]
        return there[self.number % len(there)]

    @classmethod
    def of(cls, votes: Mapping[int, Vote], gone: Collection[int]) -> Self:
        """Derive the decision of a round from the votes.

        A mean includes the training of all replicas in its round. A replica that did
        not get the mean, because its parent in the tree failed, adds nothing to the
        next one. If no replica got the mean, all keep their progress.

        Example:
            >>> votes = {0: Vote(4, 4, 60), 1: Vote(4, 4, 20), 2: Vote(4, 3, 20)}
            >>> decided = RoundDecision.of(votes, gone=[])
            >>> decided.number, decided.weights, decided.members
            (5, {0: 0.75, 1: 0.25}, (0, 1, 2))
        """
        here = {r: votes[r] for r in sorted(votes) if r not in gone}
        latest = max(vote.mean_round for vote in here.values())
        current = [r for r, vote in here.items() if vote.mean_round == latest]
        ended = all(vote.ended for vote in here.values())
        if ended:
            same = here[current[0]].digest
            current = [r for r in current if here[r].digest == same]
        members = tuple(r for r, vote in here.items() if not vote.parked)
        trained = {r: here[r].examples for r in current if not here[r].parked}
        total = sum(trained.values())
        settles = ended and not total and any(vote.owes for vote in here.values())
        weights = {r: n / total for r, n in trained.items() if n} if total else {}
        decided = cls(
            number=1 + max(vote.last_round for vote in here.values()),
            latest=latest,
            weights=weights,
            members=members,
            current=tuple(current),
            donors=tuple(r for r in current if not here[r].examples),
            exact=all(here[r].ended or here[r].rests for r in members)
            or latest < 0
            or len(members) < 2
            or not set(members) <= set(current),
            settles=settles,
            over=ended and not total and not settles and len(current) == len(here),
        )
        # All models are equal; the root contributes its own.
        return replace(decided, weights={decided.root: 1.0}) if settles else decided


ROUND_KEY = "average"  # barrier key of all rounds


class AveragingExchange(Exchange):
    """One replica's side of parameter averaging.

    Attributes:
        reduce_state: The arrays that are averaged, and the rounding errors left here.
    """

    kind = AVERAGING

    def __init__(self, context: ReplicaContext, options: "ParameterAveraging") -> None:
        super().__init__(context)
        self.averages_optimizer = options.average_optimizer
        self._options = options
        self._channel = context.channel
        self._replica = context.replica
        self.reduce_state = ReduceState(
            context.module,
            context.optimizer if options.average_optimizer else None,
            options.outer,
            compressed=options.compression is not None,
            untrained=context.untrained,
        )
        # A joining replica begins with the state of one replica at some step. It
        # fetches the common state before its first step, unless no other replica is
        # left then.
        self._vote = Vote(
            last_round=0, mean_round=-1 if context.joins else 0, examples=0
        )
        self._behind = context.joins  # other replicas may have a later mean
        self._trained = 0  # steps of this fit
        self._since = 0  # steps since the last mean
        self._untrained = context.untrained
        self._steps_made = 0  # steps over all fits
        self._sent_bytes, self._sent_kind = 0, ""  # sent in this step
        self._wait_s = 0.0  # waited in this step
        self.exchanged = False
        self._start: Parameters | None = None  # as in `SoloExchange`

    @override
    def load_(self, common: State, per_replica: Sequence[State]) -> None:
        check_like({"steps_made": 0}, common, "exchange")
        self._steps_made = common["steps_made"]
        outer = self.reduce_state.outer
        if "residual" in common:  # whole, on every initial replica
            self._start = self.agreed()
            deliver_(self.context.module, common)
            if outer is not None:
                outer.follow_()
        if not common.keys() & {
            "round",
            "outer",
        }:  # of a lone replica, or an earlier fit
            return
        check_like({"outer": None, "round": 0}, common, "exchange")
        if common["outer"] is not None and outer is not None:
            outer.restore_(common["outer"])
        if not self.context.joins:
            # The number of a round determines the tree of its mean.
            self._vote = Vote(
                last_round=common["round"], mean_round=common["round"], examples=0
            )

    @override
    def before_step(self, interval: int) -> None:
        self._wait_s, self._sent_bytes = 0.0, 0
        while self._behind:
            latest = self._run_round().latest
            self._behind = self._vote.mean_round < latest
        self.reduce_state.keep_common_()

    @override
    def after_step(self, interval: int, examples: int) -> None:
        self._steps_made += 1
        self._stats.steps += 1
        self._since += 1
        self._trained += 1
        if self._trained.bit_count() == 1:
            self._untrained.find_changed()
        examples += self._vote.examples
        self._vote = self._vote._replace(examples=examples, rests=False)
        self.exchanged = self._since == self._options.frequency
        if self.exchanged:
            self._average_all()

    def _average_all(self) -> None:
        """Run rounds until this replica's training is in a mean."""
        while self._vote.examples:
            self._run_round()
        self._channel.progress(self._steps_made)

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        if ended:
            while not self._run_round(ended=True).over:
                pass
            self._behind = False
            self._channel.progress(self._steps_made, interval)
            return
        # Also after the last step of an interval: its mean is computed now.
        self._untrained.find_changed()
        self._vote = self._vote._replace(rests=True)
        self._average_all()
        self._publish_state()
        self._channel.set_idle(self._vote._replace(parked=True).to_wire())
        self._behind = True

    def _run_round(self, *, ended: bool = False) -> RoundDecision:
        """Run one round: vote, and carry out the decision."""
        digest = checksum_of(self.context.module) if ended else 0
        owes = bool(self.reduce_state.residual)
        self._vote = self._vote._replace(ended=ended, digest=digest, owes=owes)
        if not self._vote.examples:
            self._publish_state()
        kind = BarrierKind.AGREE if ended else BarrierKind.ROUND
        started = time.perf_counter()
        gathered = self._channel.barrier(ROUND_KEY, self._vote.to_wire(), kind)
        self._wait_s += time.perf_counter() - started
        if self._replica in gathered.gone:
            raise Stopped("the other replicas continued without this one")
        decided = RoundDecision.of(Vote.by_replica(gathered.payloads), gathered.gone)
        # By now, all replicas have fetched the blobs of the round before.
        self._channel.drop_blobs(keep=self._state_name)
        self._vote = self._vote._replace(last_round=decided.number)
        self.reduce_state.resolve_residual_(decided.latest)
        if decided.weights:
            self._average(decided)
        elif self._replica not in decided.current:
            self._fetch_state(decided)
        return decided

    def _average(self, decided: RoundDecision) -> None:
        stamp = Stamp(
            self._channel.run, self._replica, decided.number, self._steps_made
        )
        topology = MeshTopology(decided.number, decided.members, self._options.fan_out)
        mean = TreeMean(
            self.reduce_state,
            self._channel,
            topology,
            decided.root,
            stamp,
            exact=decided.exact,
        )
        late = not set(decided.members) <= set(decided.current)
        weight = decided.weights.get(self._replica)
        blob = mean.reduce(weight, with_outer=late)
        if blob is not None:
            self._sent_bytes += mean.sent_bytes
            self._sent_kind = mean.kind
            if not decided.settles:
                self._stats.exchanges += 1
                self._stats.density_sum += 1.0
            mean.load_(blob, step=not decided.settles)
            self._note_mean(decided.number)

    def _note_mean(self, mean: int) -> None:
        self._vote = self._vote._replace(mean_round=mean, examples=0)
        self._since = 0
        self.reduce_state.resolve_residual_(mean)

    @property
    def _state_name(self) -> str:
        return f"state {self._vote.mean_round}"

    def _publish_state(self) -> None:
        self._channel.publish_blob(self._state_name, self.reduce_state.to_blob())

    def _fetch_state(self, decided: RoundDecision) -> None:
        start = self._replica % len(decided.donors)
        for donor in decided.donors[start:] + decided.donors[:start]:
            blob = self._channel.fetch_blob(donor, f"state {decided.latest}")
            if blob is not None:
                self.reduce_state.load_blob_(blob)
                self._note_mean(decided.latest)
                return

    @override
    def agreed(self) -> Parameters:
        start, self._start = self._start, None
        return start or super().agreed()

    @override
    def step_stats(self) -> StepStats:
        if not self.exchanged:
            return StepStats(wait_s=self._wait_s)
        return StepStats(
            density=1.0,
            sent_bytes=self._sent_bytes,
            kind=self._sent_kind or None,
            residual_norm=self.reduce_state.residual_norm(),
            wait_s=self._wait_s,
        )

    @override
    def admit(self) -> dict[str, Any]:
        return {**super().admit(), "step": self._steps_made}

    @override
    def state(self) -> ExchangeState:
        outer = self.reduce_state.outer
        common = {
            PARAMETERS: trained_in(self.context.module),
            "outer": None if outer is None else outer.values(),
            "steps_made": self._steps_made,
            "round": self._vote.last_round,
        }
        return ExchangeState(common, {})

    @override
    def carried(self, *, ended: bool) -> State:
        return {"steps_made": self._steps_made, "sent": {}}


@dataclass(frozen=True)
class ParameterAveraging(TrainingMaster):
    """Average the replicas' models every few steps.

    With `frequency` 1 and plain SGD, k replicas with batches of b rows behave like one
    process with batches of k x b rows. A failed replica costs at most its training
    since the last mean; the other replicas average without it.

    Args:
        frequency: Steps of each replica between two means, >= 1.
        average_optimizer: Whether to average the optimizer's state too; else each
            replica keeps its own, and the trainer gets the weighted mean at the end.
        outer: Creates a `torch.optim.Optimizer` from a list of parameters. The gradient
            is the last common parameters minus the new mean. With
            SGD, learning rate 0.7 and Nesterov momentum 0.9, this is DiLoCo. None: no
            outer optimizer, replicas continue from the mean.
        compression: "dense8": replicas send differences to the last common parameters
            in eight bits per parameter. Replicas add the rounding error to the next
            mean. The last mean of a sync interval has no rounding. None: 32 bits.
        replicas_per_worker: See `GradientSharing`.
        min_replicas: See `GradientSharing`.
        rejoin_timeout: See `GradientSharing`.
        fan_out: Fan-out of the tree of workers along which means are computed, >= 1.

    Raises:
        OptionError: If an option is not allowed; names its value and what is allowed.

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
    resumes: ClassVar = (UNSHARED, AVERAGING)

    def __post_init__(self) -> None:
        check_whole("frequency", self.frequency, 1)
        check_flag("average_optimizer", self.average_optimizer)
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
            state = {Key(ReduceOp.SUM, "parameters"): np.ones(512, np.float32)}
            from_blob(to_blob(state, Stamp(0, 0, 1, 1))[0])

    @property
    @override
    def solo_scale(self) -> float | None:
        return 1.0 if self.outer is None else None

    @override
    def attach(self, context: ReplicaContext) -> Exchange:
        return AveragingExchange(context, self)
