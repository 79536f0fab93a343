"""A worker whose device has failed, in a cluster of its own."""

import numpy as np
import pytest
from torch import nn

from daskdl import ReplicaError
from tests.support.devices import DEVICE, cluster_on_device
from tests.support.problems import trainer

ROWS = 480


class Tokens(nn.Module):
    """Classes of rows of five numbers below 20."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.embedding(x).mean(dim=1))


@pytest.mark.slow
def test_a_worker_is_as_new_after_an_index_out_of_range():
    """On a CUDA device the error comes late, and the process cannot go on."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 20, (ROWS, 5)), rng.integers(0, 4, ROWS)
    wrong = tokens.copy()
    wrong[100] = 20
    on_cuda = DEVICE.type == "cuda"
    with cluster_on_device(1) as client:
        fitted = trainer(client, model=Tokens, device=DEVICE)

        with pytest.raises(ReplicaError) as caught:
            fitted.fit(wrong, labels, epochs=2, batch_size=16)

        reason = "device-side assert" if on_cuda else "index out of range"
        assert caught.match(rf"replica 0 on tcp://\S+: .*{reason}")
        assert ("client.restart()" in str(caught.value)) == on_cuda
        client.restart(timeout=60)
        assert fitted.fit(tokens, labels, batch_size=16)[-1]["examples"] == ROWS
