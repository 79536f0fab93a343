"""Whether a fit is made of what the one is that it goes on from."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl.errors import OptionError
from daskdl.training.checkpointing import Fingerprint


class Net(nn.Module):
    def __init__(self, width=3, dtype=torch.float32, **more):
        super().__init__()
        self.layer = nn.Linear(width, 2, dtype=dtype)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(4))
        for name, tensor in more.items():
            self.register_buffer(name, tensor)


def likeness(module=None, optimizer=torch.optim.SGD, scheduler=None):
    module = module or Net()
    parameters = [p for p in module.parameters() if p.requires_grad]
    made = optimizer(parameters)
    return Fingerprint.of(module, made, scheduler and scheduler(made))


def halved(optimizer):
    return lr_scheduler.StepLR(optimizer, 1)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 5)


def test_the_same_is_accepted_whatever_its_numbers_are():
    ours = likeness(optimizer=lambda p: torch.optim.SGD(p, lr=0.5), scheduler=halved)

    ours.check(likeness(scheduler=halved), "memory://x")


def test_it_is_the_same_when_it_has_been_written():
    own = likeness(scheduler=halved)

    assert Fingerprint.from_values(own.values()) == own


def thawed():
    net = Net()
    net.frozen.requires_grad_()
    return net


def renamed():
    net = Net()
    net.other = net.layer
    del net.layer
    return net


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Net(5), r"layer.weight is float32 \(2, 3\) there, and float32 \(2, 5\) in"),
        (Net(dtype=torch.float64), r"layer.weight is float32 .* and float64 \(2, 3\)"),
        (renamed(), r"layer.weight is float32 \(2, 3\) there, and None in the model"),
        (thawed(), r"frozen.weight is float32 \(2, 2\), not trained there, and flo"),
        (Net(more=torch.zeros(1)), r"more is None there, and float32 \(1,\), not tr"),
    ],
    ids=["larger", "of another dtype", "renamed", "thawed", "with a buffer more"],
)
def test_another_model_is_refused(module, message):
    with pytest.raises(OptionError, match=f"memory://x is of another model: {message}"):
        likeness(module).check(likeness(), "memory://x")


def groups(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}])


@pytest.mark.parametrize(
    ("optimizer", "shown"),
    [(torch.optim.Adam, r"Adam of \[2\]"), (groups, r"SGD of \[1, 1\]")],
)
def test_another_optimizer_is_refused(optimizer, shown):
    message = rf"another optimizer: SGD of \[2\] parameters there, and {shown} param"
    with pytest.raises(OptionError, match=message):
        likeness(optimizer=optimizer).check(likeness(), "memory://x")


@pytest.mark.parametrize(("scheduler", "shown"), [(cosine, "Cosine"), (None, "None")])
def test_another_scheduler_is_refused(scheduler, shown):
    message = f"another scheduler: StepLR there, and {shown}"
    with pytest.raises(OptionError, match=message):
        likeness(scheduler=scheduler).check(likeness(scheduler=halved), "memory://x")


def test_one_where_there_was_none_begins():
    likeness(scheduler=halved).check(likeness(), "memory://x")


@pytest.mark.parametrize(
    "values",
    [None, {}, [], [{}, "SGD"], [[], "SGD", None], [{}, None, None], [{}, "SGD", 3]],
    ids=repr,
)
def test_what_it_did_not_make_is_refused(values):
    with pytest.raises(ValueError, match="it is made of"):
        Fingerprint.from_values(values)
