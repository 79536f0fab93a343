"""Writing checkpoints of a running fit, and resuming from one.

Replicas copy their state at a barrier and write it in the background while training
continues. A resumed fit validates the checkpoint; errors name the file and the field.
"""

import functools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import Callback, Checkpoint
from daskdl.channel.base import BarrierResult, Channel
from daskdl.channel.leasing import SyncPoint
from daskdl.channel.protocol import Natural, WaitCause, check, read
from daskdl.config import Bound, Timeouts
from daskdl.data.named_columns import Columns
from daskdl.data.storage import Store
from daskdl.errors import OptionError, SaveError, WaitTimeoutError
from daskdl.saving.checkpoints import (
    COMMON,
    CheckpointPlan,
    CheckpointStamp,
    CompleteCheckpoint,
    Copy,
    Part,
    Series,
    complete_at,
    of_replica,
)
from daskdl.training.base import (
    TrainingMaster,
    others_in,
    trained_in,
)
from daskdl.training.epoch_control import StoppingDecision, only
from daskdl.training.state import (
    PARAMETERS,
    SHARING,
    LoadedPart,
    ReplicaState,
    StartState,
    State,
    class_name,
    described,
    differing_wrappers,
    is_same_class,
    restoring,
)
from daskdl.training.telemetry import EpochTotals, Reports, RowLog
from daskdl.util import settle

T = TypeVar("T")


def run_in_thread(action: Callable[[], T], name: str) -> "Future[T]":
    """Run a function in a new daemon thread."""
    future: Future[T] = Future()
    # A daemon: a store that hangs must not keep the interpreter from exiting.
    threading.Thread(
        target=settle, args=(future, action), name=name, daemon=True
    ).start()
    return future


def wait_for(channel: Channel, future: "Future[T]", bound: Bound, what: str) -> T:
    """Wait for a thread while sending heartbeats; leave if the run is stopped.

    Exceptions of the thread propagate.
    """
    if not channel.wait(WaitCause.CHECKPOINT, future, bound.seconds):
        raise WaitTimeoutError(f"{what} took longer than {bound}")
    return future.result()


class CheckpointWriter:
    """Takes checkpoints of one replica, and writes its parts in a thread.

    All replicas agree when a checkpoint is due. At most one copy is written at a time.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        replica: int,
        channel: Channel,
        timeouts: Timeouts,
        rows: RowLog,
        taken: int = 0,
    ) -> None:
        self._plan = plan
        self._replica = replica
        self._channel = channel
        self._bound = timeouts.bound("data")
        self._rows = rows
        self._taken = taken
        self._series = plan.series
        self._written = -1  # number of the last checkpoint written
        self._members: tuple[int, ...] = ()  # replicas with a part in the last one
        self._writing: tuple[int, Future[None]] | None = None
        self._copies: dict[str, Copy] = {}  # copies of the last one, by part

    def header(self) -> dict[str, Any]:
        """Return plain values for a joining replica."""
        return {"checkpoints": self._taken, "rows": self._rows.rows}

    def counters(self) -> dict[str, int]:
        """Return the counters for the other replicas at a barrier."""
        return {
            "checkpoints": self._taken,
            "written": self._last_written(),
            "rows": len(self._rows.rows),
        }

    def end_epoch(
        self,
        epoch: int,
        gathered: BarrierResult,
        reports: Reports,
        over: bool,
        make: Callable[[], ReplicaState],
    ) -> None:
        """Take a checkpoint at the end of an epoch if one is due."""
        self._rows.end_epoch(epoch, reports, gathered.counted)
        if self._plan.rule.due(epoch) or over:
            self.take(gathered, make)

    def take(self, gathered: BarrierResult, make: Callable[[], ReplicaState]) -> None:
        """Copy the state, and begin to write this replica's parts of a checkpoint."""
        self.finish()
        counters = {r: note["checkpoint"] for r, note in gathered.payloads.items()}
        taken = max(counts["checkpoints"] for counts in counters.values())
        self._taken, stamp = taken + 1, self._plan.stamp(taken)
        members = tuple(sorted(counters.keys() - gathered.gone.keys()))
        written = {counts["written"] for counts in counters.values()}
        check_previous = written == {stamp.number - 1} and {*self._members} <= {
            *members
        }
        self._members = members
        state, store = make(), self._series.folder(stamp.number)
        parts: dict[str, tuple[State, State]]
        parts = {of_replica(self._replica): ({}, state.per_replica)}
        # A replica that joined later may lack rows of the history.
        if self._replica == max(members, key=lambda r: counters[r]["rows"]):
            header = {
                **state.header,
                "rows": self._rows.rows,
                "members": list(members),
                "count": self._plan.before + taken + 1,
            }
            parts[COMMON] = header, state.common
        self._copies = {  # in the memory of the last copies
            name: Part(store, name).copied(stamp, header, part, self._copies.get(name))
            for name, (header, part) in parts.items()
        }
        write = functools.partial(self._write, stamp.number, check_previous)
        name = f"daskdl-checkpoint-{self._replica}"
        self._writing = stamp.number, run_in_thread(write, name)

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._writing is not None:
            number, writing = self._writing
            what = f"writing to {self._series.folder(number).url}"
            wait_for(self._channel, writing, self._bound, what)
            self._last_written()

    def _last_written(self) -> int:
        """Return the number of the last checkpoint with its parts written."""
        if self._writing is not None and self._writing[1].done():
            self._written, done = self._writing
            self._writing = None
            done.result()
        return self._written

    # ---- writing thread

    def _write(self, number: int, check_previous: bool) -> None:
        """Write the copies, the common part last.

        Args:
            number: Number of the checkpoint.
            check_previous: Whether all parts of the previous one must be visible here.
        """
        previous = self._series.folder(number - 1)
        for name, copy in self._copies.items():
            if name == COMMON and check_previous and complete_at(previous) is None:
                raise SaveError(
                    f"all replicas have written their parts of {previous.url}, but "
                    "some are missing; all workers must share this folder"
                )
            Part(self._series.folder(number), name).write(copy)
        if COMMON in self._copies:
            self._plan.prune()


def parameters_of(optimizer: Optimizer, model: nn.Module) -> dict[str, str]:
    """Describe each parameter of an optimizer, by its name in the model.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> parameters_of(torch.optim.SGD([layer.bias]), layer)
        {'bias': 'float32 (1,), parameter 0 of group 0'}
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    descriptions = {}
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            place = f"parameter {i} of group {number}"
            name = names.get(id(parameter), f"another {place}")
            descriptions[name] = f"{described(parameter)}, {place}"
    return descriptions


class Fingerprint(NamedTuple):
    """A description of the model, optimizer and scheduler to which saved state belongs.

    Attributes:
        tensors: Dtype and shape of the model's parameters and buffers by name, and the
            places of parameters in the optimizer.
        optimizer: Qualified name of the class.
        scheduler: Qualified name of the class; None without a scheduler.

    Example:
        >>> layer = nn.Linear(3, 2, bias=False)
        >>> Fingerprint.of(layer, torch.optim.SGD(layer.parameters()), None)[1:]
        ('torch.optim.sgd.SGD', None)
    """

    tensors: Mapping[str, str]
    optimizer: str
    scheduler: str | None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        persistent_only: bool = False,
    ) -> Self:
        """Describe model, optimizer and scheduler.

        Checkpoints contain all buffers, saves only the persistent ones.
        """
        others = others_in(module)
        if persistent_only:
            persistent = module.state_dict().keys()
            others = {name: t for name, t in others.items() if name in persistent}
        return cls(
            {name: described(t) for name, t in trained_in(module).items()}
            | parameters_of(optimizer, module)
            | {name: f"{described(t)}, not trained" for name, t in others.items()},
            class_name(optimizer),
            None if scheduler is None else class_name(scheduler),
        )

    def check(self, saved: "Fingerprint", what: str, remedy: str) -> None:
        """Refuse state with another fingerprint; a saved one may have no scheduler."""
        for kind in ("optimizer", "scheduler"):
            ours, theirs = getattr(self, kind), getattr(saved, kind)
            if theirs is not None and not is_same_class(str(ours), theirs):
                raise OptionError(
                    f"{what} has the {kind} {theirs}, but this trainer has {ours}; "
                    f"{remedy}"
                )
        if different := differing_wrappers(saved.tensors, self.tensors):
            raise OptionError(f"{what} belongs to another model: {different}")
        for name in {**saved.tensors, **self.tensors}:
            ours = self.tensors.get(name, "missing")
            theirs = saved.tensors.get(name, "missing")
            if ours != theirs:
                raise OptionError(
                    f"{what} belongs to another model, or to an optimizer of other "
                    f"parameters: {name} is {theirs} there, but {ours} in this "
                    f"trainer; {remedy}"
                )


# Columns of the history that the code reads; others are only displayed.
_ROW = dict.fromkeys(
    ("epoch", "loss", "examples", "density", "threshold", "clipped"), float
)

# Header fields. `complete_at` and `StoppingDecision.of` validate the other ones.
_HEADER = {
    "epoch": Natural,
    "sync_point": SyncPoint | None,
    "epochs_before": Natural,
    "columns": Mapping[str, Sequence[str]],
    "scaled_by": Sequence[str],
    "kind": str,
    "fingerprint": tuple[Mapping[str, str], str, str | None],
}


@dataclass(frozen=True)
class ResumePlan:
    """The header of the checkpoint that a fit resumes.

    Attributes:
        store: The folder of the checkpoint.
        stamp: Stamp of the checkpoint.
        members: Replicas with a part in the checkpoint, ascending.
        epoch: First epoch to train, counted from 0.
        sync_point: Remaining work of that epoch if it has begun; None: all of it.
        rows: Rows of the history so far.
        decision: Early-stopping decision after the last row.
        epochs_before: Epochs of earlier fits of the trainer.
        columns: Names of the columns of the tables that the model is trained on.
        scaled_by: Digests of the normalizers that its rows went through.
        count: Checkpoints of the fit up to and including this one.
        kind: Kind of the replicas' exchanges.
        fingerprint: Fingerprint of the fit.
    """

    store: Store
    stamp: CheckpointStamp
    members: Sequence[int]
    epoch: int
    sync_point: SyncPoint | None
    rows: Sequence[Mapping[str, Any]]
    decision: StoppingDecision
    epochs_before: int
    columns: Columns
    scaled_by: Sequence[str]
    count: int
    kind: str
    fingerprint: Fingerprint

    @classmethod
    def of(cls, checkpoint: CompleteCheckpoint) -> Self:
        """Read the header of a checkpoint."""
        store, stamp, header = checkpoint
        with restoring(store.url_of(f"{COMMON}.json")):
            check({name: header[name] for name in _HEADER}, _HEADER)
            rows, point = header["rows"], header["sync_point"]
            # Rows may be missing if only replicas that joined later remained.
            if header["epoch"] < len(rows):
                raise ValueError(f"{header['epoch']} epochs, but {len(rows)} rows")
            for row in rows:
                check({name: row[name] for name in _ROW}, _ROW)
            columns = header["columns"].items()
            return cls(
                store=store,
                stamp=stamp,
                members=header["members"],
                epoch=header["epoch"],
                sync_point=None if point is None else read(point, SyncPoint),
                rows=rows,
                decision=StoppingDecision.of(header["stopping"]),
                epochs_before=header["epochs_before"],
                columns={place: tuple(names) for place, names in columns},
                scaled_by=tuple(header["scaled_by"]),
                count=header["count"],
                kind=header["kind"],
                fingerprint=Fingerprint(*header["fingerprint"]),
            )

    def check(
        self,
        master: TrainingMaster,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
    ) -> None:
        """Check that the checkpoint fits the options of a fit."""
        if self.kind not in master.resumes:
            raise OptionError(
                f"{self.store.url} was written by {self.kind} replicas, which "
                f"{type(master).__name__} cannot resume; use the same master"
            )
        Fingerprint.of(model, optimizer, scheduler).check(
            self.fingerprint,
            self.store.url,
            "resume with the same model, optimizer and scheduler",
        )


def resume_plan(resume: Any, callbacks: Sequence[Callback]) -> ResumePlan | None:
    """Find the checkpoint that a fit resumes; None if it resumes none."""
    if resume is None or resume is False:
        return None
    rule = only(Checkpoint, callbacks) if resume is True else resume
    if rule is None:
        raise OptionError(
            "resume=True needs a Checkpoint among the callbacks, got none; pass the "
            "URL of the checkpoints"
        )
    if isinstance(rule, Checkpoint):
        series = Series.at(rule.url, rule.storage_options)
    else:
        series = Series.at(rule)
    checkpoint = complete_at(series.store) or series.newest()
    if checkpoint is not None:
        return ResumePlan.of(checkpoint)
    if resume is True:  # no checkpoint has been written yet
        return None
    raise SaveError(f"{series.store.url} has no complete checkpoint")


def checkpoints_of(
    callbacks: Sequence[Callback], resume: ResumePlan | None
) -> CheckpointPlan | None:
    """Plan the checkpoints of a fit; None if it writes none."""
    rule: Checkpoint | None = only(Checkpoint, callbacks)
    if rule is None:
        return None
    series, run = Series.at(rule.url, rule.storage_options), secrets.token_hex(8)
    return CheckpointPlan(
        series,
        rule,
        origin=run if resume is None else resume.stamp.origin,
        run=run,
        first_number=max(series.numbers(), default=0) + 1,
        before=0 if resume is None else resume.count,
    )


# Required fields of the state of each part; None: any type.
_COMMON = {
    "early_stopping": {
        "decision": None,
        "monitor": None,
        "elapsed_s": 0.0,
        "best": None,
        "best_epoch": None,
    },
    "rows": None,
}
_PER_REPLICA = {
    "exchange": {},
    "schedule": None,
    "scaler": {},
    "totals": vars(EpochTotals()),
    "loss_watch": {"first": None, "last": None, "block": None, "levels": None},
    "random": {"cpu": torch.get_rng_state()},
    "steps": 0,
    "examples": 0,
    "weight": 0.0,
}


def start_state(plan: ResumePlan, place: int, initial: int) -> StartState:
    """Read the parts of a checkpoint that one initial replica continues from.

    Args:
        plan: The checkpoint.
        place: Place of the replica among the initial ones, from 0.
        initial: Number of initial replicas.
    """
    members = plan.members
    parts = [_part(plan, of_replica(replica)) for replica in members[place::initial]]
    # A replica without a part starts with the optimizer of another one.
    donor = parts[:1] or [_part(plan, of_replica(members[place % len(members)]))]
    return StartState(plan.kind, _part(plan, COMMON), donor[0], parts)


def check_checkpoint(start: StartState, module: nn.Module) -> None:
    """Check the fields of all parts, and the tensors against a module."""
    parameters = {} if start.kind == SHARING else {PARAMETERS: trained_in(module)}
    tensors = {"exchange": parameters, "tensors": others_in(module)}
    start.check({**_COMMON, **tensors}, _PER_REPLICA)


def _part(plan: ResumePlan, name: str) -> LoadedPart:
    part = Part(plan.store, name)
    at = part.store.url_of(part.index)
    stamp, state = part.read()
    if stamp != plan.stamp:
        raise SaveError(f"{at} belongs to another checkpoint")
    return LoadedPart(state, at)
