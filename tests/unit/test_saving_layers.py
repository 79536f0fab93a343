"""Layers of torch.nn are built again as they were, or refused by name."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from daskdl import OptionError, SaveError
from daskdl.saving.module_state import ModuleState, build, describe

LEAVES = [
    nn.Linear(3, 2),
    nn.Linear(3, 2, bias=False),
    nn.Bilinear(2, 3, 1, bias=False),
    nn.Identity(),
    nn.Conv2d(1, 2, (3, 1), stride=2, padding=1, groups=1),
    nn.Conv1d(2, 4, 3, padding="same", padding_mode="circular", bias=False, groups=2),
    nn.ConvTranspose2d(1, 2, 3, stride=2, output_padding=1, dilation=2),
    nn.BatchNorm2d(3, eps=1e-3, momentum=None, affine=False),
    nn.BatchNorm1d(3, track_running_stats=False),
    nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    nn.LayerNorm((2, 3), elementwise_affine=False),
    nn.LayerNorm(3, bias=False),
    nn.GroupNorm(2, 4, affine=False),
    nn.RMSNorm(3),
    nn.Dropout(0.25, inplace=True),
    nn.Embedding(5, 2, padding_idx=1, max_norm=2.0),
    nn.EmbeddingBag(5, 2, mode="sum"),
    nn.LSTM(2, 3, num_layers=2, bidirectional=True, dropout=0.5, batch_first=True),
    nn.LSTM(2, 3, proj_size=2),
    nn.RNN(2, 3, nonlinearity="relu", bias=False),
    nn.GRU(2, 3),
    nn.LSTMCell(2, 3),
    nn.MultiheadAttention(4, 2, bias=False, add_bias_kv=True, kdim=3, batch_first=True),
    nn.GELU("tanh"),
    nn.PReLU(3, init=0.5),
    nn.LeakyReLU(0.2),
    nn.Softmax(dim=-1),
    nn.Threshold(0.5, 20),
    nn.Hardtanh(-2, 3),
    nn.MaxPool2d(2, stride=1, ceil_mode=True),
    nn.AvgPool1d(2, count_include_pad=False),
    nn.AdaptiveAvgPool2d((1, None)),
    nn.Flatten(2),
    nn.Unflatten(1, (2, 3)),
    nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    nn.ZeroPad2d((1, 2, 0, 0)),
    nn.PixelShuffle(2),
    nn.CosineSimilarity(dim=0),
    nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1, reduction="sum"),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
    nn.HuberLoss(delta=2.0),
    nn.TripletMarginLoss(margin=0.5, p=1),
    nn.KLDivLoss(log_target=True),
    nn.GaussianNLLLoss(full=True),
]


def tied():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


def shared():
    relu = nn.ReLU()
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, relu, nn.Sequential(layer, relu))


def lazy():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    model(torch.ones(2, 3))
    return model


def frozen():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].eval()
    return model


MODELS = {
    "tied": tied,
    "shared": shared,
    "lazy": lazy,
    "frozen": frozen,
    "named": lambda: nn.Sequential(OrderedDict(a=nn.Linear(3, 2), b=nn.ReLU())),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 1)))),
    "empty": lambda: nn.Sequential(),
    "list": lambda: nn.ModuleList([nn.Linear(3, 1), nn.ModuleDict({"x": nn.ReLU()})]),
    "bfloat16": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).bfloat16(),
    "float16": lambda: nn.Linear(3, 2).half(),
    "float64": lambda: nn.LSTM(3, 2).double(),
    "mixed": lambda: nn.Sequential(nn.Linear(3, 2).bfloat16(), nn.Linear(2, 1)),
}


def again(module):
    """Described, through JSON, built, and given the state of the first."""
    plan = json.loads(json.dumps(describe(module, "model"), allow_nan=False))
    rebuilt = build(plan)
    ModuleState.of(module).put_into(rebuilt)
    return rebuilt


def check_alike(rebuilt, module):
    assert repr(rebuilt) == repr(module)
    ours, theirs = module.state_dict(), rebuilt.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype, name
        assert torch.equal(theirs[name], tensor), name
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    assert [n for n, p in rebuilt.named_parameters() if p.requires_grad] == trained
    assert [m.training for m in rebuilt.modules()] == [
        m.training for m in module.modules()
    ]


@pytest.mark.parametrize("module", LEAVES, ids=repr)
def test_a_layer_or_a_loss_is_built_again(module):
    check_alike(again(module), module)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_of_layers_is_built_again(model):
    module = model()

    check_alike(again(module), module)


def test_what_is_built_again_computes_the_same():
    module = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))

    assert torch.equal(again(module)(x)[0], module(x)[0])


def test_tied_weights_are_one_parameter_again():
    rebuilt = again(tied())

    assert rebuilt[0].weight is rebuilt[1].weight


def test_a_layer_that_is_there_twice_is_one_again():
    rebuilt = again(shared())

    assert rebuilt[0] is rebuilt[2][0]
    assert rebuilt[1] is rebuilt[2][1]


def test_building_takes_no_memory_and_no_random_numbers():
    plan = describe(nn.Linear(3, 2), "model")
    plan["arguments"]["dict"] = [["in_features", 10**7], ["out_features", 10**7]]
    state = torch.get_rng_state()

    rebuilt = build(plan)

    assert rebuilt.weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)


class Own(nn.Module):
    def forward(self, x):
        return x


class Derived(nn.Linear):
    pass


def with_attribute():
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].note = "mine"
    return module


def with_value():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].eps = torch.tensor(1e-3)
    return module


def with_hook():
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].register_forward_hook(lambda *_: None)
    return module


def with_forward():
    module = nn.ReLU()
    module.forward = lambda x: -x
    return module


def with_buffer():
    module = nn.ReLU()
    module.register_buffer("own", torch.ones(1))
    return module


def with_parameter():
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].weight = nn.Parameter(torch.ones(2, 5))
    return module


def resized():
    module = nn.Linear(3, 2)
    module.in_features = 4
    return module


REFUSED = {
    "own": (Own, "model is a .*Own, which is no layer or container of torch.nn"),
    "inside": (lambda: nn.Sequential(nn.ReLU(), Own()), r"model\.1 is a .*Own"),
    "derived": (lambda: Derived(3, 2), "model is a .*Derived"),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), "TransformerEncoder"),
    "attribute": (with_attribute, r"model\.0 has an attribute note"),
    "value": (with_value, r"model\.0\.eps is a|model\.0 has a value of eps"),
    "hook": (with_hook, r"model\.0 has a value of _forward_hooks"),
    "forward": (with_forward, "model has an attribute forward"),
    "buffer": (with_buffer, "model has a buffer own"),
    "parameter": (with_parameter, r"model\.0 has a parameter weight"),
    "resized": (resized, "model has a parameter weight"),
    "normed": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
        r"model\.0 is a .*ParametrizedLinear",
    ),
    "triplet": (
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=torch.dist),
        "model.distance_function is a",
    ),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED)
def test_what_its_arguments_do_not_make_is_refused_by_name(model, message):
    with pytest.raises(OptionError, match=message):
        describe(model(), "model")


def leaf(name, **arguments):
    return {"class": name, "arguments": {"dict": [list(a) for a in arguments.items()]}}


def deep(plan, depth):
    for _ in range(depth):
        plan = {"class": "Sequential", "children": [["0", plan]]}
    return plan


@pytest.mark.parametrize(
    "plan",
    [
        None,
        [],
        {},
        {"class": 3},
        {"class": "Nothing", "arguments": {"dict": []}},
        leaf("Module"),
        leaf("Transformer", num_encoder_layers=10**9),
        leaf("LazyLinear", out_features=3),
        leaf("ParameterList"),
        leaf("functional"),
        leaf("Linear"),
        leaf("Linear", in_features=-1, out_features=2),
        leaf("Linear", in_features="x", out_features=2),
        leaf("Linear", in_features=10**30, out_features=2),
        leaf("Linear", in_features=3, out_features=2, code="x"),
        leaf("Linear", in_features=3, out_features=2, device="cpu"),
        leaf("GRU", input_size=1, hidden_size=1, device="cpu"),
        leaf("Embedding", num_embeddings=3, embedding_dim=2, _freeze=True),
        leaf("RNN", input_size=1, hidden_size=1, num_layers=10**9),
        leaf("RNN", input_size=1, hidden_size=1, num_layers="2"),
        {"class": "Linear"},
        {"class": "Linear", "arguments": [3, 2]},
        {"class": "Sequential"},
        {"class": "Sequential", "children": 3},
        {"class": "Sequential", "children": [["0"]]},
        {"class": "Sequential", "children": [["a.b", leaf("ReLU")]]},
        {"class": "Sequential", "children": [[["x"], leaf("ReLU")]]},
        {"class": "ModuleList", "children": [["7", leaf("ReLU")]]},
        {"class": "Sequential", "children": [["0", {"same": ""}]]},
        {"class": "Sequential", "children": [["0", {"same": "1"}]]},
        {"same": "0"},
        {"same": []},
        deep(leaf("ReLU"), 100),
    ],
    ids=lambda plan: str(plan)[:60],
)
def test_a_file_that_describes_no_layers_is_refused(plan):
    with pytest.raises(SaveError):
        build(plan)
