"""How one trainer makes its steps: what the user chose, checked and packed together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks.base import Callback
from daskdl.data import trees
from daskdl.data.accuracy import has_accuracy
from daskdl.data.batches import Transform
from daskdl.data.checks import (
    check_rows,
    check_step,
    check_whole,
    of_validation,
    rows_like,
)
from daskdl.data.labels import LabelCheck
from daskdl.data.models import trainable
from daskdl.data.source import Source, shown_rows
from daskdl.errors import OptionError
from daskdl.objective import Objective
from daskdl.packed import Packed, copied
from daskdl.saving.plain import Plain
from daskdl.training.adoption import Standing
from daskdl.training.learning_rate import LearningRate, Scheduling
from daskdl.training.oversight import Oversight
from daskdl.training.short_steps import warn_of_short_steps
from daskdl.training.stepping import Stepping
from daskdl.training.task import Recipe


class Accepted(NamedTuple):
    """What is known of labels once all goes together."""

    labels: LabelCheck | None  # for those that are loaded later; a transform: none
    class_count: int | None  # of what the loss gets, if that are classes


@dataclass(frozen=True)
class Method:
    """What a model is trained with.

    Args:
        objective: What is to become small.
        optimizer: Makes an optimizer from parameters.
        stepping: How a step is made.
        scheduling: How the learning rate changes.
        oversight: What is watched meanwhile.
        transform: What is made of each batch before, or None.

    Raises:
        OptionError: If there is no optimizer.
    """

    objective: Objective
    optimizer: Callable[[Any], Optimizer]
    stepping: Stepping
    scheduling: Scheduling
    oversight: Oversight = field(default_factory=Oversight)
    transform: Transform | None = None

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                "optimizer must be a function that makes one from parameters, such as "
                "lambda params: torch.optim.SGD(params, lr=0.1), got None"
            )

    def check(self, model: nn.Module, sources: Mapping[str, Source]) -> Accepted:
        """Refuse what does not go together; no worker is touched.

        Args:
            model: Not changed.
            sources: Of each phase, of which some rows are known.

        Returns:
            What is known of the labels then.
        """
        train = sources["train"]
        objective, transform = self.objective, self.transform
        accepted = check_step(
            model, objective, self.optimizer, *rows_like(train), transform
        )
        labels = None if transform else LabelCheck(accepted)
        if labels is not None:
            check_whole(train, labels)
        self.stepping.check_model(model)
        self.scheduling.check(self.optimizer, model)
        if "validation" in sources:
            with of_validation():
                rows = rows_like(sources["validation"])
                check_rows(model, objective, *rows, transform)
                if labels is not None:
                    check_whole(sources["validation"], labels)
        return Accepted(labels, None if accepted is None else accepted.classes)

    def has_accuracy(self, model: nn.Module, sources: Mapping[str, Source]) -> bool:
        """Whether the validation data, which `check` has accepted, have an accuracy.

        Args:
            model: Not changed.
            sources: As in `check`.
        """
        if "validation" not in sources:
            return False
        rows = rows_like(sources["validation"])
        return has_accuracy(model, self.objective, *rows, self.transform)

    def check_written(self, model: nn.Module) -> None:
        """Refuse an optimizer or a scheduler whose state no checkpoint can have.

        Args:
            model: Not changed.

        Raises:
            OptionError: Naming what of it cannot be written without code.
        """
        optimizer = self.optimizer(trainable(copied(model)))
        plain = Plain()
        plain.encode(optimizer.state_dict(), "the state of the optimizer")
        rate = LearningRate(optimizer, self.scheduling)
        plain.encode(rate.values(), "the state of the scheduler")

    def warn(self, model: nn.Module, replicas: int) -> None:
        """Warn of what so many replicas, of whose updates the mean counts, do worse.

        Args:
            model: Not changed.
            replicas: At the start of the fit.
        """
        warn_of_short_steps(self.optimizer(trainable(model)), replicas)

    def recipe(
        self,
        model: nn.Module,
        standing: Standing,
        callbacks: Sequence[Callback],
        train: Source,
        *,
        here: bool = False,
    ) -> Packed[Recipe]:
        """Pack what each replica needs of it.

        Args:
            model: At its start.
            standing: What it goes on from.
            callbacks: Those that stay on the client are left out.
            train: Of which some rows are known.
            here: The replicas are in this process.

        Raises:
            ModelError: If something of it cannot be pickled.
        """
        moved = standing.moved
        rows = trees.of_both(lambda tree: shown_rows(tree, 2), rows_like(train))
        recipe = Recipe(
            model,
            self.objective,
            self.optimizer,
            None if moved is None else moved.optimizer.state_dict(),
            # The others may hold what cannot be pickled.
            [callback for callback in callbacks if callback.runs_on_workers],
            rows,
            self.scheduling,
            b"" if moved is None else moved.schedule(self.scheduling),
            self.transform,
            standing.residual,
        )
        return Packed(recipe, "trainer", here=here)
