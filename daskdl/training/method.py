"""How one trainer makes its steps: what the user chose, checked and packed together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback
from daskdl.data.arrays import first_rows
from daskdl.data.checks import check_step, check_validation, trainable
from daskdl.data.rehearsal import ClassRange
from daskdl.errors import OptionError
from daskdl.objective import Objective
from daskdl.packed import Packed
from daskdl.training.adoption import Moved
from daskdl.training.learning_rate import Scheduling
from daskdl.training.oversight import Oversight
from daskdl.training.short_steps import warn_of_short_steps
from daskdl.training.stepping import Stepping
from daskdl.training.task import Recipe


@dataclass(frozen=True)
class Method:
    """What a model is trained with.

    Args:
        objective: What is to become small.
        optimizer: Makes an optimizer from parameters.
        stepping: How a step is made.
        scheduling: How the learning rate changes.
        oversight: What is watched meanwhile.

    Raises:
        OptionError: If there is no optimizer.
    """

    objective: Objective
    optimizer: Callable[[Any], Optimizer]
    stepping: Stepping
    scheduling: Scheduling
    oversight: Oversight = field(default_factory=Oversight)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                "optimizer must be a function that makes one from parameters, such as "
                "lambda params: torch.optim.SGD(params, lr=0.1), got None"
            )

    def check(
        self, model: nn.Module, X: Any, y: Any, validation: Any
    ) -> ClassRange | None:
        """Refuse what does not go together; no worker is touched.

        Args:
            model: Not changed.
            X: Examples that `check_data` has accepted.
            y: Their labels, likewise.
            validation: A pair of the same kinds, or None.

        Returns:
            The labels that the loss accepts, see `check_step`.
        """
        labels = check_step(model, self.objective, self.optimizer, X, y)
        self.stepping.check_model(model)
        self.scheduling.check(self.optimizer, model)
        if validation is not None:
            check_validation(model, self.objective, validation)
        return labels

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
        moved: Moved | None,
        callbacks: Sequence[Callback],
        rows: tuple[Any, Any],
    ) -> Packed[Recipe]:
        """Pack what each replica needs of it.

        Args:
            model: At its start.
            moved: By earlier fits.
            callbacks: Those that stay on the client are left out.
            rows: X and y, of which two rows are taken.

        Raises:
            ModelError: If something of it cannot be pickled.
        """
        x, y = (first_rows(part, 2).copy() for part in rows)
        recipe = Recipe(
            model,
            self.objective,
            self.optimizer,
            None if moved is None else moved.optimizer.state_dict(),
            # The others may hold what cannot be pickled.
            [callback for callback in callbacks if callback.runs_on_workers],
            (x, y),
            self.scheduling,
            b"" if moved is None else moved.schedule(self.scheduling),
        )
        return Packed(recipe, "trainer")
