"""What frozen parameters that the model changes itself cost on the network."""

import logging

import torch
from torch import nn

from daskdl import GradientSharing
from tests.support.problems import rows, trainer

X, Y = rows(64)


class Counted(nn.Module):
    """Counts its steps in a frozen vector."""

    def __init__(self, size, changes=True):
        super().__init__()
        self.inner, self.changes = nn.Linear(20, 4), changes
        self.count = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x):
        if self.training and self.changes:
            self.count += 1
        return self.inner(x)


def fitted(client, size, changes=True, master=None):
    own = trainer(
        client,
        model=lambda: Counted(size, changes),
        master=GradientSharing() if master is None else master,
    )
    own.fit(X, Y, epochs=2, batch_size=16)
    return own


def said_of_it(caplog):
    return [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]


def test_averaged_arrays_count_as_sent_and_received(threads):
    changing, still = (fitted(threads, 200_000, changes) for changes in (True, False))

    for row in changing.history_:
        assert row["received_bytes"] == row["sent_bytes"]  # of two replicas
        assert 1_600_000 <= row["sent_bytes"] < 1_700_000
    assert all(row["sent_bytes"] < 100_000 for row in still.history_)


def test_large_frozen_parameters_cause_one_warning(threads, caplog):
    caplog.set_level(logging.WARNING, logger="daskdl.training")

    fitted(threads, 9_000_000)

    (said,) = said_of_it(caplog)
    assert "36.0 MB on each of 2 replicas" in said
    assert "72.0 MB" in said
    assert "ParameterAveraging" in said
