"""What frozen parameters that the model changes itself cost on the network."""

import functools
import logging

import torch
from torch import nn

from daskdl import GradientSharing
from tests.support.problems import rows, trainer

X, Y = rows(64)


class Counted(nn.Module):
    """Counts its steps in a frozen vector."""

    def __init__(self, size, changes):
        super().__init__()
        self.inner, self.changes = nn.Linear(20, 4), changes
        self.count = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x):
        if self.training and self.changes:
            self.count += 1
        return self.inner(x)


def fitted(client, size, changes):
    model = functools.partial(Counted, size, changes)
    own = trainer(client, model=model, master=GradientSharing())
    own.fit(X, Y, epochs=2, batch_size=16)
    return own


def test_averaged_arrays_count_as_sent_and_received_and_cause_one_warning(
    threads, caplog, monkeypatch
):
    monkeypatch.setattr("daskdl.training.dask_backend.MUCH_FROZEN", 2**20)
    caplog.set_level(logging.WARNING, logger="daskdl.training")

    changing, still = (fitted(threads, 200_000, changes) for changes in (True, False))

    for row in changing.history_:
        assert row["received_bytes"] == row["sent_bytes"]  # of two replicas
        assert 1_600_000 <= row["sent_bytes"] < 1_700_000
    assert all(row["sent_bytes"] < 100_000 for row in still.history_)
    (said,) = [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]
    assert "0.8 MB on each of 2 replicas" in said
    assert "1.6 MB" in said
    assert "ParameterAveraging" in said
