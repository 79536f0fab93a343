"""Rows of embeddings that only one replica touches move as far as in one process."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import DivergedError, GradientSharing, Trainer

X = np.arange(8)[:, None]  # each example has a row of its own
RATE = 0.1


class Bag(nn.EmbeddingBag):
    def __init__(self, sparse):
        super().__init__(8, 1, mode="sum", sparse=sparse)
        nn.init.zeros_(self.weight)


@pytest.mark.parametrize(
    ("optimizer", "sparse", "moved"),
    [
        (torch.optim.SparseAdam, True, RATE),
        (torch.optim.Adam, False, RATE / 2**0.5),  # the mean, at a higher rate
        (torch.optim.SGD, True, RATE * 2 / 4 / 2),  # the mean of two means over four
    ],
)
def test_a_row_moves_by_whole_steps_of_optimizers_that_normalise(
    optimizer, sparse, moved
):
    trainer = Trainer(
        lambda: Bag(sparse),
        nn.MSELoss(),
        lambda params: optimizer(params, lr=RATE),
        master=GradientSharing(
            replicas_per_worker=2, max_staleness=0, warmup_steps=1, exchange_every=1
        ),
        client=False,
    )

    trainer.fit(X, np.ones((8, 1), "float32"), batch_size=4)

    weights = trainer.model_.weight.detach().flatten().tolist()
    assert weights == pytest.approx([moved] * 8, rel=0.02)  # sent in eight bits


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({}, "use adapt_rate=False"), ({"update_scale": "sum"}, "update_scale")],
)
def test_a_run_that_diverges_names_the_option_that_adds_updates_up(options, remedy):
    trainer = Trainer(
        lambda: Bag(True),
        nn.MSELoss(),
        lambda params: torch.optim.SparseAdam(params, lr=3e38),
        master=GradientSharing(replicas_per_worker=2, max_staleness=0, **options),
        client=False,
    )

    with pytest.raises(DivergedError) as caught:
        trainer.fit(X, np.ones((8, 1), "float32"), batch_size=4)

    named = [
        n for n in ("use adapt_rate=False", "update_scale") if n in str(caught.value)
    ]
    assert named == [remedy]
