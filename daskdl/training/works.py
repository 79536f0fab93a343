"""What one replica is made of: all that has a state which outlives a step.

Its beginning is here: anew, from the snapshot of another replica, or from a checkpoint.
So is what it leaves for such beginnings.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from daskdl.channel.base import Channel, Entry, Gathered
from daskdl.channel.leasing import Pause
from daskdl.compression.flat import Frozen
from daskdl.data.models import trainable
from daskdl.errors import ChannelError
from daskdl.packed import Packed
from daskdl.training.background import awaited, begun
from daskdl.training.checkpoint_writer import CheckpointWriter, Copyable
from daskdl.training.checkpoints import Checkpoints
from daskdl.training.exchange import Exchange
from daskdl.training.learning_rate import LearningRate
from daskdl.training.likeness import Likeness
from daskdl.training.loss_watch import LossWatch
from daskdl.training.optimizer_state import (
    load_optimizer_,
    restore_optimizer_,
    state_of,
)
from daskdl.training.outcome import KeptResidual
from daskdl.training.random_state import generators, restore_generators
from daskdl.training.resuming import Inheritance, inherit
from daskdl.training.row_log import RowLog
from daskdl.training.seat import Seat
from daskdl.training.states import check_like, restoring
from daskdl.training.stepping import Stepper
from daskdl.training.stopper import Stopper
from daskdl.training.task import Recipe, Tally, TaskOptions
from daskdl.training.tensors import load_tensors_, others_in


class Works:
    """The works of a replica, when it has come into the run.

    Args:
        number: Of the replica in the run.
        options: The same for all replicas.
        recipe: The user's objects, this replica's own copies.
        channel: This replica's end of the run.
        device: Where to compute.

    Attributes:
        module: The model, on its device.
        optimizer: Of its trainable parameters.
        rate: The learning rate of that.
        stepper: Makes its steps.
        stopper: When it is enough.
        watch: Of the losses.
        steps: That this replica has made.
        seen: Examples, over all epochs.
        weight: Share of the examples all replicas saw.
        tally: Of the epoch that runs.
        first_epoch: That is trained.
        met: Whether it has agreed with all others, after the start of the run.
        lap: That runs, counted from 0 over all epochs.
        checkpoints: That are written; None: there are none.
    """

    def __init__(
        self,
        number: int,
        options: TaskOptions,
        recipe: Recipe,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self._number = number
        self._options = options
        self._channel = channel
        self._device = device
        self.module = recipe.model.to(device).train()
        self._frozen = Frozen(self.module)
        self.steps = self.seen = 0
        self.weight = 0.0
        self.tally = Tally()
        self.lap = 0
        self.met = False
        self.watch = LossWatch(options.oversight.max_loss_rise)
        entry = channel.join()
        inherited = self._inherited(entry)
        self.optimizer: Optimizer = recipe.optimizer(trainable(self.module))
        if recipe.optimizer_state is not None:
            self.optimizer.load_state_dict(recipe.optimizer_state)
        seat = self._seat(entry, inherited, recipe.residual)
        self._exchange = options.master.attach(seat)
        self.rate = LearningRate(
            self.optimizer, recipe.scheduling, recipe.schedule, options.epochs
        )
        self.stepper = Stepper(
            self.module, recipe.objective, self.optimizer, options.stepping, device
        )
        torch.manual_seed(options.seed + number)
        self.stopper = Stopper(options.judging, entry.snapshot)
        self.checkpoints = self._checkpoints(entry, inherited)
        self.first_epoch = options.first_epoch
        if inherited is not None:
            self._resume(inherited)
        if entry.snapshot is not None:
            self._follow(entry.snapshot)
        channel.serve(self.snapshot)

    @property
    def exchange(self) -> Exchange:
        """With the others; another one may come in its place."""
        return self._exchange

    def _inherited(self, entry: Entry) -> Inheritance | None:
        """Read what a founder of a resumed run goes on from."""
        plan, members = self._options.resume, sorted(entry.members)
        if plan is None or entry.snapshot is not None:
            return None
        place = members.index(self._number)
        reading = begun(lambda: inherit(plan, place, len(members)), "daskdl-resume")
        bound = self._options.timeouts.bound("data")
        inherited = awaited(self._channel, reading, bound, f"reading {plan.url}")
        # Before anything is made of them.
        inherited.check(self.module)
        with restoring(inherited.common_at):
            load_tensors_(self.module, inherited.tensors)
        return inherited

    def _seat(
        self,
        entry: Entry,
        inherited: Inheritance | None,
        residual: KeptResidual | None,
    ) -> Seat:
        resumed = None if inherited is None else inherited.exchange
        return Seat(
            self.module,
            self._channel,
            self._number,
            entry.members,
            self._options.last if resumed is None else resumed.last,
            entry.snapshot,
            self.optimizer,
            resumed,
            residual if entry.snapshot is None else None,  # founders have all of it
            self._frozen,
        )

    def _checkpoints(
        self, entry: Entry, inherited: Inheritance | None
    ) -> Checkpoints | None:
        options = self._options
        if options.checkpoints is None:
            return None
        before = entry.snapshot or {"checkpoints": 0, "rows": ()}
        rows = before["rows"] if inherited is None else inherited.common["rows"]
        writer = CheckpointWriter(
            options.checkpoints, self._number, self._channel, options.timeouts
        )
        columns, left_out = options.judging.columns, options.left_out
        log = RowLog(options.size, columns, rows, left_out=left_out)
        return Checkpoints(options, writer, log, before["checkpoints"])

    def _resume(self, inherited: Inheritance) -> None:
        self._restore(inherited)
        self.seen = sum(part["seen"] for part in inherited.own)
        self.weight = sum(part["weight"] for part in inherited.own)
        # Nobody sends anything before all are there, on the same grid.
        gathered = self._channel.gather("resume", {"digest": self.exchange.digest()})
        check_alike(gathered, "after they have read a checkpoint")
        for part, at in zip(inherited.own, inherited.own_at, strict=True):
            with restoring(f"{at}: tally"):
                tally = Tally(**part["tally"])
                check_like(vars(Tally()), vars(tally), "it")
            self.tally.add(tally)

    def _restore(self, inherited: Inheritance) -> None:
        """Put back what was read; a wrong value is told by file and field."""
        common, donor, at = inherited.common, inherited.donor, inherited.donor_at
        of_all = "optimizer" in common
        with restoring(f"{inherited.common_at if of_all else at}: optimizer"):
            restore_optimizer_(self.optimizer, inherited.optimizer)
        with restoring(f"{at}: schedule"):
            self.rate.restore_(donor["schedule"])
        with restoring(f"{inherited.common_at}: stopper"):
            self.stopper.restore_(common["stopper"], self._options.first_epoch)
        with restoring(f"{at}: scaler"):
            self.stepper.restore_(donor["scaler"])
        for part in inherited.own[:1]:
            self.steps = part["steps"]
            with restoring(f"{at}: watch"):
                self.watch.restore_(part["watch"])
            with restoring(f"{at}: random"):
                restore_generators(part["random"], self._device)

    def _follow(self, snapshot: Mapping[str, Any]) -> None:
        """Come in later: where another replica was, but for the epoch."""
        load_optimizer_(self.optimizer, snapshot["optimizer"])
        self.rate.load_(snapshot["schedule"])
        _, epoch, report, self.lap = self._channel.activate(snapshot["step"])
        self.rate.catch_up_(epoch)
        if report:
            self.stopper.catch_up(epoch - 1, ordered(report))
        self.first_epoch = epoch

    def snapshot(self) -> dict[str, Any]:
        """What a newcomer begins with."""
        self._exchange = self._exchange.opened()
        checkpoints = self.checkpoints
        return {
            **self._exchange.snapshot(),
            "optimizer": Packed(state_of(self.optimizer), "optimizer").payload,
            "schedule": self.rate.state(),
            **self.stopper.snapshot(),
            **({} if checkpoints is None else checkpoints.snapshot()),
        }

    def note(self) -> dict[str, Any]:
        """What the others are told at the end of an epoch."""
        return {
            **self.rate.note(),
            **self.stopper.note(),
            **self.checkpoint_note(),
        }

    def checkpoint_note(self) -> dict[str, Any]:
        """What the others are told whenever all meet."""
        return {} if self.checkpoints is None else self.checkpoints.note()

    def checkpoint(self, epoch: int, pause: Pause | None = None) -> Copyable:
        """What a checkpoint has of this replica.

        Args:
            epoch: The next one to train in, counted from 0.
            pause: What is left of it, if it has begun; None: all.
        """
        options, state = self._options, self.exchange.state()
        likeness = Likeness.of(self.module, self.optimizer, self.rate.scheduler)
        said = {
            "epoch": epoch,
            "pause": None if pause is None else pause.values(),
            "epochs_before": options.epochs_before,
            "kind": state.kind,
            "likeness": likeness.values(),
            "verdict": self.stopper.verdict.values(),
        }
        common = {
            "exchange": state.common,
            "tensors": others_in(self.module),
            "stopper": self.stopper.values(),
        }
        own = {
            "exchange": state.own,
            "schedule": self.rate.values(),
            "scaler": self.stepper.values(),
            "tally": vars(Tally() if pause is None else self.tally),
            "watch": self.watch.values(),
            "random": generators(self._device),
            "steps": self.steps,
            "seen": self.seen,
            "weight": self.weight,
        }
        of_all = self.exchange.averages_optimizer
        (common if of_all else own)["optimizer"] = state_of(self.optimizer)
        return Copyable(said, common, own)


def check_alike(gathered: Gathered, when: str) -> None:
    """Refuse to go on if replicas that ought to be alike are not.

    Args:
        gathered: Notes with a ``"digest"`` each.
        when: For the message.

    Raises:
        ChannelError: If they differ.
    """
    digests = {r: note["digest"] for r, note in gathered.notes.items()}
    if len(set(digests.values())) > 1:
        raise ChannelError(f"replicas differ {when}: checksums by replica {digests}")


def ordered(notes: Mapping[int, Any]) -> list[Any]:
    """Of all replicas, in the order of their numbers."""
    return [notes[replica] for replica in sorted(notes)]
