"""The learning rate over all fits of a trainer."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from typing_extensions import override

from daskdl.callbacks.base import Callback, FitBegin, FitEnd
from daskdl.errors import OptionError


class Rate(NamedTuple):
    """A learning rate; of an epoch it is the one at its end, of all replicas."""

    epoch: int  # from 0, over all fits
    learning_rate: float  # of the first parameter group
    replica: int | None = None
    step: int | None = None  # of this replica in this fit, from 1


class LearningRateMonitor(Callback):
    """Keep the learning rates of all fits that an instance is used for.

    A schedule goes on from fit to fit, and a history is of one of them. It runs on the
    client, from what the replicas report there anyway.

    Args:
        every: ``"epoch"``, or ``"step"``: those steps of each replica that
            ``history.steps`` has, see `telemetry_every` of a trainer.

    Attributes:
        rates: By epoch, or by replica and step of each epoch, over all fits. Those of
            steps come when a fit ends.

    Raises:
        OptionError: If `every` is neither.

    Example:
        >>> monitor = LearningRateMonitor()
        >>> for epochs_before in (0, 1):
        ...     monitor.on_fit_begin(FitBegin(2, 1, epochs_before, 32, 1000, 650))
        ...     monitor.on_epoch_end({"epoch": 0, "learning_rate": 0.1})
        >>> [(rate.epoch, rate.learning_rate) for rate in monitor.rates]
        [(0, 0.1), (1, 0.1)]
    """

    rates: list[Rate]

    def __init__(self, every: Literal["epoch", "step"] = "epoch") -> None:
        if every not in ("epoch", "step"):
            raise OptionError(f"every must be 'epoch' or 'step', got {every!r}")
        self.rates = []
        self._every = every
        self._before = 0

    @override
    def on_fit_begin(self, fit: FitBegin) -> None:
        self._before = fit.epochs_before

    @override
    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        if self._every == "epoch":
            self.rates.append(Rate(self._before + row["epoch"], row["learning_rate"]))

    @override
    def on_fit_end(self, end: FitEnd) -> None:
        if self._every == "step":
            self.rates.extend(
                Rate(
                    self._before + row["epoch"],
                    row["learning_rate"],
                    row["replica"],
                    row["step"],
                )
                for row in end.history.steps
            )

    def to_pandas(self) -> Any:
        """The rates as a `pandas.DataFrame`; needs pandas."""
        import pandas as pd

        columns = (
            list(Rate._fields) if self._every == "step" else list(Rate._fields[:2])
        )
        return pd.DataFrame(self.rates, columns=list(Rate._fields))[columns]
