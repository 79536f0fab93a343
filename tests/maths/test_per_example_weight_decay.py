import pytest
import torch
from torch import nn, optim

from daskdl.errors import OptionError
from daskdl.evaluation.per_example import _ADD_TO_GRADIENT, penalty_of
from daskdl.keras.module import as_module, library
from daskdl.objective import Penalised


def model():
    return nn.Linear(3, 2)


def groups(module):
    return [
        {"params": [module.weight], "weight_decay": 0.25},
        {"params": [module.bias]},
    ]


def test_each_group_has_its_own_weight_decay():
    own = model()

    penalty = penalty_of(own, optim.SGD(groups(own), weight_decay=2.0))

    expected = 0.125 * own.weight.square().sum() + own.bias.square().sum()
    assert penalty == pytest.approx(expected.item())


@pytest.mark.parametrize("kind", _ADD_TO_GRADIENT, ids=lambda kind: kind.__name__)
def test_its_gradient_is_what_the_optimizer_adds(kind):
    """Of a loss that is zero, the step is the one with the penalty as the loss."""
    torch.manual_seed(0)
    own, other = model().double(), model().double()
    other.load_state_dict(own.state_dict())
    decaying = kind(own.parameters(), lr=0.1, weight_decay=0.5)
    plain = kind(other.parameters(), lr=0.1, weight_decay=0.0)
    start = penalty_of(own, decaying)

    for p in own.parameters():
        p.grad = torch.zeros_like(p)
    decaying.step()
    loss = sum(0.25 * p.square().sum() for p in other.parameters())
    loss.backward()
    plain.step()

    assert start == pytest.approx(loss.item())
    for mine, expected in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, weight_decay=0.1),
        lambda p: optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
        lambda p: optim.Adafactor(p, weight_decay=0.1),
    ],
    ids=["AdamW", "NAdam", "Adafactor"],
)
def test_a_decay_apart_from_the_gradient_is_no_term_of_a_loss(make):
    own = model()

    with pytest.raises(OptionError, match=r"weight_decay=0.1, which is taken off the"):
        penalty_of(own, make(own.parameters()))


def test_without_weight_decay_there_is_nothing_to_add():
    own = model()

    assert penalty_of(own, optim.AdamW(own.parameters(), weight_decay=0.0)) == 0.0


def test_the_optimizer_of_another_model_is_refused():
    with pytest.raises(OptionError, match="that are not those of model_"):
        penalty_of(model(), optim.SGD(model().parameters(), weight_decay=0.1))


class Ridge(nn.Linear, Penalised):
    def penalty(self):
        return self.weight.square().sum()


def test_what_a_model_adds_of_itself_is_added():
    own = Ridge(3, 2)
    optimizer = optim.SGD([own.bias], lr=0.1, weight_decay=2.0)

    penalty = penalty_of(own, optimizer)

    expected = own.weight.square().sum() + own.bias.square().sum()
    assert penalty == pytest.approx(expected.item())


def test_the_regularisers_of_a_keras_model_are_added():
    keras = library()
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(2, kernel_regularizer="l2")
    network = keras.Sequential([keras.Input((3,)), dense])
    own = as_module(network)
    own(torch.ones(5, 3))

    penalty = penalty_of(own, optim.SGD(own.parameters(), lr=0.1))

    kernel = dense.kernel.value.detach()
    assert penalty == pytest.approx(0.01 * kernel.square().sum().item())
