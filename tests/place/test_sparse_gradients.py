"""Embeddings: sparse gradients, and rows that only one replica touches."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import DivergedError, GradientSharing, ParameterAveraging, Trainer

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
    fitted = trainer(optimizer, master=master(replicas_per_worker=2))

    first = fitted.fit(X, Y, epochs=3, batch_size=BATCH)
    second = fitted.fit(X, Y, epochs=3, batch_size=BATCH)

    assert second[-1]["loss"] < first[0]["loss"]
    [state] = fitted.optimizer_.state_dict()["state"].values()
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
    fitted = trainer(optimizer, clip_grad_norm=norm)
    torch.manual_seed(0)
    module = embedding()
    plain = optimizer(module.parameters())

    fitted.fit(X, Y, epochs=2, batch_size=BATCH, shuffle=False)
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

    torch.testing.assert_close(
        fitted.model_.weight, module.weight, rtol=1e-4, atol=1e-6
    )


# ---- rows that one replica touches move as far as in one process

ALONE = np.arange(8)[:, None]  # each example has a row of its own
ONES = np.ones((8, 1), np.float32)
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
    fitted = Trainer(
        lambda: Bag(sparse),
        nn.MSELoss(),
        lambda params: optimizer(params, lr=RATE),
        master=GradientSharing(
            replicas_per_worker=2, max_staleness=0, warmup_steps=1, exchange_every=1
        ),
        client=False,
    )

    fitted.fit(ALONE, ONES, batch_size=4)

    weights = fitted.model_.weight.detach().flatten().tolist()
    assert weights == pytest.approx([moved] * 8, rel=0.02)  # sent in eight bits


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({}, "use adapt_rate=False"), ({"update_scale": "sum"}, "update_scale")],
)
def test_a_run_that_diverges_names_the_option_that_adds_updates_up(options, remedy):
    fitted = Trainer(
        lambda: Bag(True),
        nn.MSELoss(),
        lambda params: torch.optim.SparseAdam(params, lr=3e38),
        master=GradientSharing(replicas_per_worker=2, max_staleness=0, **options),
        client=False,
    )

    with pytest.raises(DivergedError) as caught:
        fitted.fit(ALONE, ONES, batch_size=4)

    named = [
        n for n in ("use adapt_rate=False", "update_scale") if n in str(caught.value)
    ]
    assert named == [remedy]
