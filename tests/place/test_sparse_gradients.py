"""Embeddings with sparse gradients: optimizer states and clipping."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import GradientSharing, ParameterAveraging, Trainer

ROWS, BATCH, WORDS = 96, 12, 10
X = np.random.default_rng(0).integers(0, WORDS, ROWS)  # some several times in a batch
Y = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)

OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "sparse adam": functools.partial(torch.optim.SparseAdam, lr=0.05),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5),
}
EACH = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)

pytestmark = [
    # Of torch, at the first sparse tensor that Adagrad makes.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


def embedding():
    return nn.Embedding(WORDS, 3, sparse=True)


def trainer(optimizer, **options):
    return Trainer(embedding, nn.MSELoss(), optimizer, client=False, **options)


@pytest.mark.parametrize("master", [GradientSharing, ParameterAveraging])
@EACH
def test_two_replicas_train_and_a_second_fit_continues(optimizer, master):
    own = trainer(optimizer, master=master(replicas_per_worker=2))

    first = own.fit(X, Y, epochs=3, batch_size=BATCH)
    second = own.fit(X, Y, epochs=3, batch_size=BATCH)

    assert second[-1]["loss"] < first[0]["loss"]
    [state] = own.optimizer_.state_dict()["state"].values()
    kept = [v for v in state.values() if getattr(v, "shape", None) == (WORDS, 3)]
    assert kept
    for tensor in kept:
        assert tensor.layout is torch.strided
        assert tensor.abs().sum() > 0


@pytest.mark.usefixtures("one_thread")
@EACH
@pytest.mark.parametrize("norm", [None, 0.1, 1e6], ids=["unclipped", "small", "large"])
def test_one_replica_is_a_plain_loop(optimizer, norm):
    """Norms use the summed gradient of an index that occurs several times."""
    own = trainer(optimizer, clip_grad_norm=norm)
    torch.manual_seed(0)
    module = embedding()
    plain = optimizer(module.parameters())

    own.fit(X, Y, epochs=2, batch_size=BATCH, shuffle=False)
    for first in [*range(0, ROWS, BATCH)] * 2:
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
