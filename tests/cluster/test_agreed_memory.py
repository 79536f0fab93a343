"""A replica has one agreed state, and a second only while the client fetches it."""

import gc
import os

import pytest
import torch
from torch import nn

from daskdl import GradientSharing
from tests.support.problems import SIZE, mlp, rows, trainer
from tests.support.watched import note, notes

X, Y = rows(480)


class Counted(nn.Module):
    """Notes how many vectors of counts there are where the model is validated."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.inner = folder, mlp()

    def forward(self, x):
        if not self.training:
            gc.collect()
            tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
            counts = {
                t.data_ptr()
                for t in tensors
                if t.dtype == torch.int32 and t.numel() >= SIZE
            }
            note(self.folder, "counts", vectors=len(counts))
        return self.inner(x)


@pytest.mark.slow
def test_what_was_agreed_on_before_is_gone_when_the_next_is_validated(client, tmp_path):
    folder = str(tmp_path)
    master = GradientSharing(max_staleness=0)
    own = trainer(client, model=lambda: Counted(folder), master=master)

    own.fit(X, Y, epochs=3, batch_size=16, validation=(X[:64], Y[:64]))

    seen = {}
    for line in notes(folder, "counts"):
        if line["pid"] != os.getpid():
            seen.setdefault(line["pid"], []).append(line["vectors"])
    assert len(seen) == 2
    assert min(min(vectors) for vectors in seen.values()) >= 1
    # The client asks one replica for what was agreed on; it may be under way.
    assert min(max(vectors) - vectors[0] for vectors in seen.values()) == 0
