"""Embeddings with sparse gradients: what such an optimizer has travels, and is kept."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    GradientSharing,
    ParameterAveraging,
    Trainer,
)

ROWS, BATCH, WORDS = 96, 12, 10
X = np.random.default_rng(0).integers(0, WORDS, ROWS)  # some several times in a batch
Y = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)

OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "sparse adam": functools.partial(torch.optim.SparseAdam, lr=0.05),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5),
}
MASTERS = {
    "sharing": functools.partial(GradientSharing, replicas_per_worker=2),
    "averaging": functools.partial(ParameterAveraging, replicas_per_worker=2),
}

pytestmark = [
    # Of torch, at the first sparse tensor that Adagrad makes.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:2 replicas with .* may learn slower:UserWarning"
    ),
]


def embedding():
    return nn.Embedding(WORDS, 3, sparse=True)


def trainer(optimizer, master, **options):
    kind = OPTIMIZERS[optimizer]
    made = MASTERS[master]()
    return Trainer(embedding, nn.MSELoss(), kind, master=made, client=False, **options)


def state(optimizer):
    """Of the only parameter: its tensors that have its shape."""
    [entries] = optimizer.state_dict()["state"].values()
    return {n: v for n, v in entries.items() if getattr(v, "shape", None) == (WORDS, 3)}


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
class TestEveryOptimizer:
    def test_two_replicas_train_and_a_second_fit_goes_on(self, optimizer, master):
        own = trainer(optimizer, master)

        first = own.fit(X, Y, epochs=3, batch_size=BATCH)
        second = own.fit(X, Y, epochs=3, batch_size=BATCH)

        assert second[-1]["loss"] < first[0]["loss"]
        kept = state(own.optimizer_)
        assert kept
        for tensor in kept.values():
            assert tensor.layout is torch.strided
            assert tensor.abs().sum() > 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("norm", [None, 0.1, 1e6], ids=["unclipped", "small", "large"])
def test_one_replica_is_a_plain_loop(optimizer, norm):
    """Of a norm over all that one index gets, however often it is in a batch."""
    own = Trainer(
        embedding,
        nn.MSELoss(),
        OPTIMIZERS[optimizer],
        client=False,
        clip_grad_norm=norm,
    )
    torch.manual_seed(0)
    module = embedding()
    plain = OPTIMIZERS[optimizer](module.parameters())

    own.fit(X, Y, epochs=2, batch_size=BATCH, shuffle=False)
    for _ in range(2):
        for first in range(0, ROWS, BATCH):
            x, y = (torch.from_numpy(a[first : first + BATCH]) for a in (X, Y))
            plain.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
            gradient = module.weight.grad.coalesce()
            length = math.sqrt(gradient.values().square().sum())
            if norm is not None and length > norm:
                gradient = gradient * (norm / length)
            module.weight.grad = gradient
            plain.step()

    torch.testing.assert_close(own.model_.weight, module.weight, rtol=1e-4, atol=1e-6)
