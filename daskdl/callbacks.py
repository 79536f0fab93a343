"""What users may hang into a run. Nothing here computes or sends."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One optimizer step of one replica, just made."""

    replica: int
    epoch: int  # from 0
    number: int  # steps this replica has made, from 1
    loss: float  # over this step's rows
    examples: int  # in this step's batch, or in all it was accumulated over


class Callback:
    """Override what is of interest; both do nothing by themselves.

    An instance that overrides `on_step` is pickled once to each replica: what it
    keeps there stays on the worker, what `on_epoch` keeps stays on the client.

    Example:
        >>> class Print(Callback):
        ...     def on_epoch(self, row):
        ...         print(f"{row['epoch']}: {row['loss']:.2f}")
        >>> Print().on_epoch({"epoch": 0, "loss": 0.5})
        0: 0.50
    """

    @property
    def runs_on_workers(self) -> bool:
        """Whether `on_step` is overridden."""
        return type(self).on_step is not Callback.on_step

    def on_step(self, step: Step) -> None:
        """Run on a worker, in the training thread, after each step.

        What it raises ends the run like an exception in the model.
        """

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Run on the client after each epoch, with its row of the history.

        What it raises stops the run and reaches the caller of `fit`.
        """
