"""What is to be measured, before model and data are known. No Dask."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.rehearsal import ignored_label
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.scale import scale_of
from daskdl.objective import Objective, OwnStep

if TYPE_CHECKING:
    from daskdl.metrics.meter import Measure


@dataclass(frozen=True)
class Wanted:
    """Sets of metrics.

    Attributes:
        sets: In the order in which they are told.
        classes: Names of the labels 0, 1, ... where the data have none; or None.
    """

    sets: tuple[MetricSet, ...]
    classes: Sequence[str] | None = None

    @classmethod
    def of(
        cls,
        metrics: Any,
        objective: Objective | None,
        classes: Sequence[str] | None = None,
    ) -> Self | None:
        """What the user asks for; None: nothing.

        Args:
            metrics: See :meth:`daskdl.Trainer.evaluate`.
            objective: Of the model, or None.
            classes: Names of the labels, or None.

        Raises:
            OptionError: If it is none of what is allowed, or there is a step.
        """
        if metrics is None:
            return None
        if isinstance(objective, OwnStep):
            raise OptionError(
                "metrics need the outputs of the model, which a step does not show; "
                "use daskdl.evaluate(trainer.model_, ..., metrics=...) if model(x) is "
                "what is to be measured"
            )
        from daskdl.metrics.choice import metric_sets

        return cls(metric_sets(metrics), classes)

    def measures(
        self,
        objective: Objective | None,
        output: Tree,
        y: Tree,
        classes: Sequence[str] | None,
    ) -> tuple["Measure", ...]:
        """Make all sets ready for a model and data.

        Args:
            objective: Of the model, or None.
            output: Of a few rows.
            y: Their labels, or None.
            classes: Names of the labels that the data have, or None.

        Raises:
            DataError: If the labels are not such as they need, or missing.
            ModelError: If the outputs are not.
        """
        if y is None:
            raise DataError("labels must be given, or data that have them, for metrics")
        for name, leaf in batching.named(output, "output"):
            if not isinstance(leaf, Tensor):
                raise ModelError(
                    "metrics need a model that returns tensors, or tuples and dicts of "
                    f"them; {name} is a {type(leaf).__name__}"
                )
        from daskdl.metrics.meter import joined, measure_of

        shown = Shown(
            joined([output]),
            joined([y]),
            scale_of(objective, output),
            classes or self.classes,
            ignored_label(objective),
        )
        with torch.no_grad():
            return tuple(measure_of(one, shown) for one in self.sets)
