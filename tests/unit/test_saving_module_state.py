"""The state of a module: all of it, into one that is alike, and into no other."""

import dataclasses

import pytest
import torch
from torch import nn

from daskdl import OptionError, SaveError
from daskdl.saving.module_state import ModuleState, build, describe


class Own(nn.Module):
    """With every kind of state that is a tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.inner.weight
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)


class Untied(Own):
    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(torch.ones(2, 2))


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}


def filled():
    module = Own()
    module.head.bias.requires_grad_(False)
    module.inner.eval()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.arange(1, tensor.numel() + 1).view(tensor.shape))
    return module


def test_everything_goes_into_a_module_that_is_alike():
    module, other = filled(), Own()

    ModuleState.of(module).load_into(other)

    for name, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.scale.tolist() == [1, 2]
    assert other.count.tolist() == [1]
    assert [n for n, p in other.named_parameters() if not p.requires_grad] == [
        "head.bias"
    ]
    assert (other.inner.training, other.head.training) == (False, True)
    assert other.head.weight is other.inner.weight


def test_a_hidden_buffer_that_the_model_fills_later_comes_back():
    module, other = Own(), Own()
    for one in (module, other):
        one.register_buffer("cache", None, persistent=False)
    module.cache = torch.ones(3)

    ModuleState.of(module).load_into(other)

    assert other.cache.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["more", "inner.more", "nothing.more", "count"])
def test_a_hidden_buffer_that_the_model_does_not_have_is_refused(name):
    state = dataclasses.replace(ModuleState.of(Own()), hidden={name: torch.ones(1)})

    with pytest.raises(SaveError, match=rf"no (buffer|tensor) '?{name}"):
        state.load_into(Own())


def test_tied_tensors_are_there_once_and_hidden_buffers_apart():
    state = ModuleState.of(filled())

    assert sorted(state.tensors) == ["count", "head.bias", "inner.bias", "inner.weight"]
    assert state.ties == {"head.weight": "inner.weight"}
    assert list(state.hidden) == ["scale"]


def test_a_state_that_is_no_tensor_is_refused_by_name():
    with pytest.raises(
        OptionError, match="_extra_state of the model's state is a dict"
    ):
        ModuleState.of(Extra(2, 2))


def wider():
    module = Own()
    module.head.bias = nn.Parameter(torch.zeros(3))
    return module


def without_scale():
    module = Own()
    del module.scale
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "there is no .* in the save; it is of another"),
        (lambda: nn.Sequential(Own()), "there is no .* in the save; it is of another"),
        (wider, r"head.bias is \(2,\) float32 in the save, and \(3,\) float32"),
        (lambda: Own().double(), r"float32 in the save, and \(2, 2\) float64"),
        (Untied, "head.weight is tied in one"),
        (without_scale, "no buffer scale in the model"),
        (lambda: Extra(2, 2), "_extra_state"),
    ],
)
def test_another_model_is_refused_by_what_differs(model, message):
    state = ModuleState.of(filled())

    with pytest.raises(SaveError, match=message):
        state.load_into(model())


def test_a_model_with_more_than_was_saved_is_refused():
    state = ModuleState.of(nn.Linear(2, 2, bias=False))

    with pytest.raises(SaveError, match="there is no bias in the save"):
        state.load_into(nn.Linear(2, 2))


class Refusing(nn.Linear):
    def load_state_dict(self, *_, **__):
        raise RuntimeError("not now")


def test_a_model_that_refuses_its_state_is_an_error_of_ours():
    with pytest.raises(SaveError, match="the model refuses its state: not now"):
        ModuleState.of(nn.Linear(2, 2)).load_into(Refusing(2, 2))


LAYERS = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
STATE = ModuleState.of(LAYERS)


def without(name):
    return {n: t for n, t in STATE.tensors.items() if n != name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": without("0.bias")}, "there is no tensor 0.bias"),
        ({"tensors": without("1.running_mean")}, "there is no tensor 1.running_mean"),
        ({"tensors": {**STATE.tensors, "2.bias": torch.ones(2)}}, "no tensor '2.bias'"),
        ({"tensors": {**STATE.tensors, "0.more": torch.ones(2)}}, "no tensor 0.more"),
        ({"tensors": {**STATE.tensors, "": torch.ones(2)}}, "no tensor"),
        ({"tensors": {**STATE.tensors, "0.bias": torch.ones(3)}}, "by its layer"),
        (
            {"tensors": {**STATE.tensors, "0.bias": torch.ones(2, dtype=torch.int64)}},
            "parameter 0.bias is torch.int64",
        ),
        (
            {"tensors": {**STATE.tensors, "1.running_mean": torch.ones(3)}},
            "by its layer",
        ),
    ],
)
def test_tensors_that_are_not_of_the_layers_are_refused(changes, message):
    state = dataclasses.replace(STATE, **changes)

    with pytest.raises(SaveError, match=message):
        state.put_into(build(describe(LAYERS, "model")))
