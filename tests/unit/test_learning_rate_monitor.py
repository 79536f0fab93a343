import pytest

from daskdl.callbacks import FitBegin, FitEnd, LearningRateMonitor, Rate
from daskdl.errors import OptionError
from daskdl.history import History, StepRow


def watch(monitor, *fits):
    """Show it fits, each a list of learning rates by epoch."""
    before = 0
    for fit in fits:
        monitor.on_fit_begin(FitBegin(2, len(fit), before, 32, 100, 10))
        history = History()
        for epoch, rate in enumerate(fit):
            monitor.on_epoch_end({"epoch": epoch, "learning_rate": rate})
            row = StepRow(epoch, 10 * epoch + 1, 1, 0.5, learning_rate=rate / 2)
            history.steps.extend([(epoch + 1, row)])
        monitor.on_fit_end(FitEnd(history, None))
        before += len(fit)


def test_the_epochs_of_all_fits_are_kept():
    monitor = LearningRateMonitor()

    watch(monitor, [0.5, 0.25], [0.125])

    assert monitor.rates == [Rate(0, 0.5), Rate(1, 0.25), Rate(2, 0.125)]
    assert list(monitor.to_pandas()) == ["epoch", "learning_rate"]


def test_so_are_the_steps_of_each_replica():
    monitor = LearningRateMonitor("step")

    watch(monitor, [0.5, 0.25], [0.125])

    assert monitor.rates == [
        Rate(0, 0.25, replica=1, step=1),
        Rate(1, 0.125, replica=1, step=11),
        Rate(2, 0.0625, replica=1, step=1),
    ]
    assert monitor.to_pandas()["step"].tolist() == [1, 11, 1]


def test_what_is_neither_is_refused():
    with pytest.raises(OptionError, match="every must be 'epoch' or 'step', got 10"):
        LearningRateMonitor(10)
