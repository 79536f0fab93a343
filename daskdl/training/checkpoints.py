"""When a replica takes part in a checkpoint, and what it knows of the fit for that."""

from collections.abc import Callable
from typing import Any

from daskdl.channel.base import Gathered
from daskdl.training.checkpoint_writer import CheckpointWriter, Copyable
from daskdl.training.row_log import RowLog
from daskdl.training.task import TaskOptions


class Checkpoints:
    """Of one replica. All replicas come to the same decisions.

    Args:
        options: Of the run, which has checkpoints.
        writer: Of this replica's parts.
        rows: Of the history, also of the epochs before this run.
        taken: In this run, before this replica came into it.
    """

    def __init__(
        self, options: TaskOptions, writer: CheckpointWriter, rows: RowLog, taken: int
    ) -> None:
        self._options = options
        self._writer = writer
        self._rows = rows
        self._taken = taken

    def snapshot(self) -> dict[str, Any]:
        """What a newcomer begins with."""
        return {"checkpoints": self._taken, "rows": self._rows.rows}

    def note(self) -> dict[str, Any]:
        """What the others are told at the end of an epoch.

        Raises:
            SaveError: If one could not be written.
        """
        return {
            "checkpoints": self._taken,
            "written": self._writer.written(),
            "rows": len(self._rows.rows),
        }

    def end_epoch(
        self,
        epoch: int,
        gathered: Gathered,
        over: bool,
        make: Callable[[], Copyable],
    ) -> None:
        """All have met: take a checkpoint if it is time.

        Args:
            epoch: Counted from 0.
            gathered: What all have said.
            over: Whether it was the last one.
            make: What is to be written.

        Raises:
            SaveError: If the one before could not be written.
        """
        self._rows.end_epoch(epoch, gathered)
        plan = self._options.checkpoints
        assert plan is not None, "else there is nothing to write to"
        if plan.rule.due(epoch) or over:
            self.take(gathered, make)

    def take(self, gathered: Gathered, make: Callable[[], Copyable]) -> None:
        """All have met, and it is time.

        Args:
            gathered: What all have said.
            make: What is to be written.

        Raises:
            SaveError: If the one before could not be written.
        """
        self._writer.finish()
        self._taken = max(note["checkpoints"] for note in gathered.notes.values())
        what = make()
        said = {**what.said, "rows": self._rows.rows}
        self._writer.begin(self._taken, gathered, what._replace(said=said))
        self._taken += 1

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            SaveError: If it could not be.
            WaitTimeoutError: If it takes too long.
        """
        self._writer.finish()
