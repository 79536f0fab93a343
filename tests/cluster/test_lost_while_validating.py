"""A worker is lost while it validates: scores and stops that it knew are not lost."""

import os
import signal

import numpy as np
import pytest
import torch
from distributed import get_worker
from torch import nn

from daskdl import Callback, ParameterAveraging
from tests.support.problems import kept, mlp, rows, trainer

pytestmark = pytest.mark.slow

X, Y = rows(960)
VALIDATION = rows(601, seed=1)
EPOCHS = 3


class LostInValidation(Callback):
    """A loss and a callback by which the worker of replica 1 goes, in epoch 1.

    It goes after some batches of validation, once.

    Args:
        folder: Of the mark that it has gone.
        how: Name of a method.
        after: Batches that it has scored by then.
        stops: Whether the replica stops the fit before, in its last step.
    """

    def __init__(self, folder, how, after, stops):
        self.mark = str(folder / "gone")
        self.how, self.after, self.stops = how, after, stops
        self.scored = None

    def on_epoch_begin(self, epoch):
        due = epoch.replica == 1 and epoch.epoch == 1
        self.scored = 0 if due and not os.path.exists(self.mark) else None

    def on_step_end(self, step):
        if self.stops and self.scored is not None:
            step.stop("enough")

    def __call__(self, output, labels):
        if not torch.is_grad_enabled() and self.scored is not None:
            self.scored += 1
            if self.scored == self.after:
                open(self.mark, "x").close()
                getattr(self, self.how)()
        return nn.functional.cross_entropy(output, labels)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def retire(self):
        worker = get_worker()
        worker.loop.add_callback(worker.close_gracefully, restart=True)


@pytest.mark.parametrize("master", [kept(), ParameterAveraging()], ids=type)
@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
@pytest.mark.parametrize("how", ["kill", "retire"])
def test_scores_and_the_stop_of_a_replica_outlive_it(
    three, tmp_path, how, stops, master
):
    lost = LostInValidation(tmp_path, how, 3, stops)
    own = trainer(
        three,
        model=mlp,
        loss=lost,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        master=master,
        metrics=["accuracy", "f1"],
        callbacks=[lost],
    )

    history = own.fit(X, Y, validation=VALIDATION, epochs=EPOCHS, batch_size=16)

    assert os.path.exists(lost.mark)
    assert len(history) == (2 if stops else EPOCHS)
    assert (history.stopping is not None and history.stopping.reason) == (
        "stopped" if stops else False
    )
    expected = own.evaluate(*VALIDATION)
    for name in ("loss", "accuracy", "f1"):
        np.testing.assert_allclose(
            history.column(f"val_{name}"), expected[name], rtol=1e-6
        )
    if not stops:
        assert history.column("examples") == [len(X)] * EPOCHS
