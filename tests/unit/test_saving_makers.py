"""What makes a model or an optimizer is imported; with arguments, it must say so."""

import functools
import json

import pytest
import torch
from torch import Tensor, nn

from daskdl import OptionError, SaveError
from daskdl.saving.json_values import Plain, Trust, decode_maker, encode_maker

NAME = __name__
TRUSTING = Plain(trust=Trust.of([NAME]))


class Net(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.layer = nn.Linear(size, 2)


def net(size=4):
    return Net(size)


def said(size: int) -> nn.Module:
    return Net(size)


def scored(output: Tensor, labels: Tensor, power: float = 2.0) -> Tensor:
    return (output - labels).abs().pow(power).mean()


def shifted(batch, by: float = 0.0) -> tuple[Tensor, Tensor]:
    return batch[0] + by, batch[1]


def strange(size: "Nowhere") -> "Nowhere":  # noqa: F821
    return Net(size)


def back(value, base):
    content = json.loads(json.dumps(encode_maker(value, base, Plain(), "model")))
    return decode_maker(content, base, TRUSTING)


@pytest.mark.parametrize(
    ("value", "base"),
    [(Net, nn.Module), (net, nn.Module), (scored, Tensor), (shifted, tuple)],
)
def test_a_class_or_a_function_comes_back_itself(value, base):
    assert back(value, base) is value


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (functools.partial(Net, 5), nn.Module),
        (functools.partial(Net, size=5), nn.Module),
        (functools.partial(said, size=5), nn.Module),
        (
            functools.partial(torch.optim.Adam, lr=0.1, betas=(0.5, 0.9)),
            torch.optim.Adam,
        ),
        (functools.partial(scored, power=3.0), Tensor),
        (functools.partial(shifted, by=1.0), tuple),
    ],
)
def test_a_partial_comes_back_with_its_arguments(value, base):
    read = back(value, base)

    assert (read.func, read.args, read.keywords) == (
        value.func,
        value.args,
        value.keywords,
    )


@pytest.mark.parametrize(
    ("value", "base", "message"),
    [
        (lambda: Net(), nn.Module, "cannot be imported"),
        (Net(), nn.Module, "is no class or function"),
        (torch.optim.SGD, nn.Module, "is no Module"),
        (functools.partial(net, size=5), nn.Module, "no return annotation of a Module"),
        (functools.partial(strange, 5), nn.Module, "no return annotation of a Module"),
        (functools.partial(Net, size=object()), nn.Module, "model.size is a"),
        (functools.partial(lambda: Net()), nn.Module, "cannot be imported"),
    ],
)
def test_what_would_not_come_back_is_refused(value, base, message):
    with pytest.raises(OptionError, match=message):
        encode_maker(value, base, Plain(), "model")


@pytest.mark.parametrize(
    "content",
    [
        {"import": "subprocess:call"},
        {"import": f"{NAME}:scored", "more": 1},
        {"import": 3},
        {"import": "torch.optim.sgd:SGD"},
        {"partial": f"{NAME}:net", "arguments": [], "keywords": {"dict": []}},
        {
            "partial": "torch.hub:load",
            "arguments": ["x", "y"],
            "keywords": {"dict": []},
        },
        {"partial": "torch.serialization:load", "arguments": ["x"], "keywords": {}},
        {"partial": f"{NAME}:Net", "arguments": 3, "keywords": {"dict": []}},
        {"partial": f"{NAME}:Net", "arguments": [], "keywords": [1]},
        {"partial": f"{NAME}:Net", "arguments": [], "keywords": {"dict": [[1, 2]]}},
        {"partial": f"{NAME}:Net"},
        [],
        None,
    ],
    ids=lambda content: str(content)[:60],
)
def test_a_file_cannot_have_anything_else_called(content):
    with pytest.raises(SaveError):
        decode_maker(content, nn.Module, TRUSTING)


def partial(name, *arguments):
    return {
        "partial": name,
        "arguments": list(arguments),
        "keywords": {"dict": []},
    }


def later(hint: "OnlyForCheckers" = None) -> "nn.Module":  # noqa: F821
    return Net()


@pytest.mark.parametrize(
    ("content", "base"),
    [
        ({"import": f"{NAME}:Net"}, nn.Module),
        ({"import": f"{NAME}:said"}, nn.Module),
        ({"import": f"{NAME}:later"}, nn.Module),
        ({"import": "torch.nn.modules.linear:Identity"}, nn.Module),
        (partial("torch.optim.sgd:SGD"), torch.optim.Optimizer),
        (partial("torch.nn.functional:mse_loss"), Tensor),
    ],
    ids=str,
)
def test_what_only_makes_such_a_thing_needs_no_trust(content, base):
    assert callable(decode_maker(content, base, Plain()))


# What of a library executes its arguments, or fetches what these say, or runs at all.
@pytest.mark.parametrize(
    "content",
    [
        partial(
            "torch.fx.graph_module:reduce_graph_module",
            {"dict": [["_code", "def forward(self): pass"]]},
            "raise SystemExit",
        ),
        partial(f"{NAME}:Net", 5),
        partial(f"{NAME}:said", 5),
        {"import": f"{NAME}:net"},
        {"import": "_pytest.config:main"},
        {"import": "not_imported_here:Net"},
    ],
    ids=str,
)
def test_what_could_do_anything_has_to_be_trusted(content):
    with pytest.raises(OptionError, match=r"pass trusted=\['\w+"):
        decode_maker(content, nn.Module, Plain())
