"""The tensors of a module by name: what is trained, the rest, and back."""

import pytest
import torch
from torch import nn

from daskdl.errors import SaveError
from daskdl.training.base import load_tensors_, others_in, trained_in


class Net(nn.Module):
    """With a frozen layer, tied weights, and buffers of both kinds."""

    def __init__(self, width=3):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.arange(2.0))
        self.register_buffer("lost", torch.arange(3), persistent=False)


def test_each_tensor_is_there_once_under_its_first_name():
    net = Net()

    assert list(trained_in(net)) == ["first.weight", "first.bias", "last.bias"]
    assert list(others_in(net)) == ["frozen.weight", "kept", "lost"]


def test_they_are_those_of_the_module_without_a_gradient():
    net = Net()

    weight = trained_in(net)["first.weight"]
    with torch.no_grad():
        net.first.weight.fill_(2.0)

    assert not weight.requires_grad
    assert weight.tolist() == [[2.0] * 3] * 3
    assert not others_in(net)["frozen.weight"].requires_grad


def test_what_was_taken_is_loaded_and_stays_tied():
    one, other = Net(), Net()
    parameters = list(other.parameters())
    tensors = {**trained_in(one), **others_in(one)}
    one.lost += 5

    load_tensors_(other, tensors)

    for name, tensor in {**trained_in(other), **others_in(other)}.items():
        assert torch.equal(tensor, tensors[name]), name
    assert other.lost.tolist() == [5, 6, 7]
    assert other.last.weight is other.first.weight
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))


def test_parameters_that_are_not_given_stay():
    one, other = Net(), Net()
    weight = other.first.weight.detach().clone()

    load_tensors_(other, others_in(one))

    assert torch.equal(other.first.weight, weight)
    assert torch.equal(other.frozen.weight, one.frozen.weight)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first.bias": torch.zeros(4)}, r"first.bias is \(4,\) in .* and \(3,\) in"),
        ({"first.bias": torch.zeros(1, 3)}, r"first.bias is \(1, 3\) in .* \(3,\) in"),
        ({"kept": torch.zeros(())}, r"kept is \(\) in the checkpoint, and \(2,\) in"),
        ({"more": torch.zeros(2)}, r"more is \(2,\) in the checkpoint, and None in"),
    ],
    ids=["longer", "with an axis more", "a number", "unknown"],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(changed, message):
    net, other = Net(), Net()
    before = {**trained_in(net), **others_in(net)}
    before = {name: tensor.clone() for name, tensor in before.items()}
    tensors = {**trained_in(other), **others_in(other), **changed}

    with pytest.raises(SaveError, match=message):
        load_tensors_(net, tensors)

    for name, tensor in {**trained_in(net), **others_in(net)}.items():
        assert torch.equal(tensor, before[name]), name


def test_a_buffer_that_is_missing_is_named():
    net = Net()
    tensors = others_in(net)
    del tensors["kept"]

    with pytest.raises(SaveError, match=r"kept is None in the checkpoint, and \(2,\)"):
        load_tensors_(net, tensors)
