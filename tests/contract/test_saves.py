"""A fitted trainer, saved and loaded: all of it comes back, or is asked for."""

import functools
import json
import math
from dataclasses import dataclass, is_dataclass

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler

import daskdl
from daskdl import (
    AdaptiveThreshold,
    Callback,
    Checkpoint,
    FailureInjection,
    FixedThreshold,
    GradientSharing,
    KeepResidual,
    LinkThreshold,
    OptionError,
    SaveError,
    Trainer,
)
from daskdl.data import MinMax, Standardize
from daskdl.data.inputs import Compose
from daskdl.history import Stopping
from daskdl.saving.trainer_state import BASES, KNOWN, NAMES, load, save
from tests.support.saves import fitted, layers, signed


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.layers(x)


def make_net():
    return Net(5)


def said_net() -> nn.Module:
    return Net(5)


def said_loss(output, labels) -> torch.Tensor:
    return (output - labels).abs().mean()


def own_loss(output, labels):
    return (output - labels).abs().mean()


def own_step(model, batch):
    return model(batch[0]).mean()


def own_optimizer(parameters):
    return torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)


def own_scheduler(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def doubled(batch):
    return batch[0] * 2, batch[1]


@dataclass(frozen=True)
class Own(Callback):
    number: int = 3


@dataclass(frozen=True, eq=False)
class Unequal(Callback):
    """What is read of it cannot be held to what was written."""

    number: int = 3


class Counting(Callback):
    """Keeps what it has seen, so it is no plain value."""


def back(one, url, optimizer=True, trusted=(__name__,), **passed):
    save(one, str(url), optimizer)
    return load(str(url), passed, trusted)


def states(optimizer):
    return optimizer.state_dict()["state"]


def check_goes_on(loaded, one):
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    ours, theirs = one.fit_state.optimizer, loaded.fit_state.optimizer
    groups = theirs.optimizer.state_dict()["param_groups"]
    assert groups == ours.optimizer.state_dict()["param_groups"]
    for number, entries in states(ours.optimizer).items():
        for name, value in entries.items():
            read = states(theirs.optimizer)[number][name]
            assert read.dtype == value.dtype
            assert torch.equal(read, value), (number, name)
    assert theirs.rate.position() == ours.rate.position()


class TestWhatComesBack:
    def test_a_trainer_of_layers_comes_back_whole(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))

        loaded = back(one, tmp_path)

        check_goes_on(loaded, one)
        assert loaded.fit_state.compression == one.fit_state.compression
        assert (loaded.fit_state.epochs, loaded.fit_state.class_count) == (2, 2)
        assert loaded.classes == ["no", "yes"]
        assert math.isnan(loaded.history[0]["loss"])
        assert loaded.history[0]["waits"] == {"end": 0.5}
        assert repr(list(loaded.history.steps)) == repr(list(one.history.steps))

    def test_what_early_stopping_saw_comes_back(self, tmp_path):
        one = fitted()
        one.history.stopping = Stopping("loss", "target", "", {0: 2.0}, 0, 2.0, True)

        assert back(one, tmp_path).history.stopping == one.history.stopping

    def test_every_argument_of_a_trainer_is_saved(self, tmp_path):
        one = fitted()
        save(one, tmp_path, True)

        written = json.loads((tmp_path / "trainer.json").read_text())

        fields = {f for f in Trainer.__dataclass_fields__.values() if f.init}
        names = {f.name for f in fields} - {"_", "client"}
        assert set(NAMES) == names
        assert set(written["content"]["arguments"]) == names

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("device", "cpu"),
            ("seed", 2**63 - 1),
            ("progress", False),
            ("autocast", torch.bfloat16),
            ("accumulate", 3),
            ("clip_grad_norm", 0.1),
            ("telemetry_every", None),
            ("max_loss_rise", None),
            ("callbacks", [FailureInjection("sleep", steps=[3], seconds=0.1), Own(5)]),
            ("callbacks", [Checkpoint("s3://bucket/x", 2, keep_best="loss")]),
            ("optimizer", own_optimizer),
            ("loss", own_loss),
            ("step", own_step),
            ("scheduler", own_scheduler),
            ("transform", doubled),
            ("transform", Compose(doubled, doubled)),
        ],
    )
    def test_an_argument_comes_back_equal(self, tmp_path, name, value):
        loaded = back(fitted(**{name: value}), tmp_path)

        assert loaded.arguments[name] == value

    def test_a_class_of_daskdl_may_move_to_another_module(self):
        kinds = [kind for kind in vars(daskdl).values() if isinstance(kind, type)]
        written = {k for k in kinds if issubclass(k, BASES) and is_dataclass(k)}

        assert len(written) >= 10
        assert written <= set(KNOWN.values())

    def test_a_torch_device_comes_back_as_its_name(self, tmp_path):
        loaded = back(fitted(device=torch.device("cpu")), tmp_path)

        assert loaded.arguments["device"] == "cpu"

    @pytest.mark.parametrize(
        "master",
        [
            GradientSharing(LinkThreshold(share=0.5), KeepResidual(), apply="strict"),
            GradientSharing({"*.bias": FixedThreshold(), "*": AdaptiveThreshold(0.5)}),
            GradientSharing(max_staleness=None, update_scale=0.5, rejoin_timeout=3.0),
        ],
    )
    def test_a_way_of_training_comes_back_equal(self, tmp_path, master):
        assert back(fitted(master=master), tmp_path).arguments["master"] == master

    @pytest.mark.parametrize("rule", [Standardize(), MinMax(-1, 1)])
    def test_a_normaliser_comes_back_equal(self, tmp_path, rule):
        x = {"a": np.array([[0.1, 7], [3, 1e-9]]), 3: np.arange(2.0)[:, None]}
        transform = rule.fit(x, client=False)

        loaded = back(fitted(transform=transform), tmp_path)

        assert loaded.arguments["transform"] == transform

    def test_a_weighted_loss_comes_back_with_its_weights(self, tmp_path):
        loss = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), label_smoothing=0.1)
        output, labels = torch.eye(2), torch.tensor([0, 0])

        loaded = back(fitted(loss=loss), tmp_path).arguments["loss"]

        assert torch.equal(loaded(output, labels), loss(output, labels))
        assert loaded.weight.tolist() == [1, 3]

    @pytest.mark.parametrize(
        "model",
        [Net, make_net, functools.partial(Net, width=6)],
        ids=["class", "function", "partial"],
    )
    def test_a_model_of_the_users_own_comes_back(self, tmp_path, model):
        one = fitted(model)
        one.model.hidden.fill_(7)

        loaded = back(one, tmp_path)

        check_goes_on(loaded, one)
        assert type(loaded.model) is Net
        assert loaded.model.hidden.tolist() == [7, 7]
        assert loaded.arguments["model"] is model or loaded.arguments[
            "model"
        ].keywords == {"width": 6}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_a_model_in_another_precision_comes_back(self, tmp_path, dtype):
        one = fitted(lambda: layers().to(dtype))

        loaded = back(one, tmp_path)

        check_goes_on(loaded, one)
        assert {p.dtype for p in loaded.model.parameters()} == {dtype}

    def test_what_was_frozen_stays_frozen(self, tmp_path):
        def model():
            module = layers()
            module[0].requires_grad_(False)
            return module

        one = fitted(model)

        loaded = back(one, tmp_path)

        check_goes_on(loaded, one)
        assert [p.requires_grad for p in loaded.model.parameters()] == [
            p.requires_grad for p in one.model.parameters()
        ]

    def test_what_was_loaded_can_be_saved_again(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.MultiStepLR(o, [1, 5]))

        loaded = back(back(one, tmp_path), tmp_path)

        check_goes_on(loaded, one)
        assert len(list(tmp_path.iterdir())) == 4

    def test_random_numbers_go_on_as_if_nothing_had_been_loaded(self, tmp_path):
        one = fitted(said_net)
        save(one, tmp_path, True)
        state = torch.get_rng_state()

        load(tmp_path, {})

        assert torch.equal(torch.get_rng_state(), state)

    def test_weights_are_a_state_dict_for_others(self, tmp_path):
        one = fitted()
        save(one, tmp_path, True)
        (file,) = tmp_path.glob("model-*.safetensors")

        module = layers()
        module.load_state_dict(safetensors.torch.load_file(file))

        for name, tensor in one.model.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor)

    def test_nothing_is_pickled(self, tmp_path):
        save(fitted(), tmp_path, True)

        kinds = {path.suffix for path in tmp_path.iterdir()}

        assert kinds == {".json", ".safetensors"}


class TestWithoutOptimizer:
    def test_optimizer_scheduler_and_thresholds_begin_anew(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))

        loaded = back(one, tmp_path, optimizer=False)

        moved = loaded.fit_state.optimizer
        assert states(moved.optimizer) == {}
        assert moved.optimizer.param_groups[0]["lr"] == 0.01
        assert moved.rate.position()[0] == 0
        assert loaded.fit_state.compression is None
        assert loaded.fit_state.epochs == 2
        assert not list(tmp_path.glob("optimizer-*"))

    def test_anything_but_true_and_false_is_refused(self, tmp_path):
        with pytest.raises(OptionError, match="optimizer must be True or False, got 1"):
            save(fitted(), tmp_path, 1)

    def test_a_state_that_is_no_plain_value_is_refused_by_name(self, tmp_path):
        one = fitted()
        states(one.fit_state.optimizer.optimizer)[0]["own"] = object()
        one.fit_state.optimizer.optimizer.state[next(one.model.parameters())]["own"] = (
            object()
        )

        with pytest.raises(OptionError, match=r"optimizer\.state\.0\.own is a"):
            save(one, tmp_path, True)

    def test_an_optimizer_that_was_exchanged_since_is_refused(self, tmp_path):
        one = fitted()
        one.arguments["optimizer"] = own_optimizer

        with pytest.raises(OptionError, match="save without it, optimizer=False"):
            save(one, tmp_path, True)
        assert not list(tmp_path.iterdir())

    def test_of_a_scheduler_that_was_exchanged_since_no_state_is_saved(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1))
        one.arguments["scheduler"] = own_scheduler

        loaded = back(one, tmp_path)

        assert loaded.fit_state.optimizer.rate.position()[0] == 0


class TestWhatHasToBePassed:
    @pytest.mark.parametrize(
        ("options", "name", "why"),
        [
            (
                {"model": lambda: Net(7)},
                "model",
                "model is a .*Net, .* cannot be imported",
            ),
            ({"model": Net(7)}, "model", "is no class or function"),
            ({"loss": lambda o, y: own_loss(o, y)}, "loss", "cannot be imported"),
            ({"step": lambda m, b: own_step(m, b)}, "step", "cannot be imported"),
            ({"optimizer": lambda p: own_optimizer(p)}, "optimizer", "groups"),
            ({"scheduler": lambda o: own_scheduler(o)}, "scheduler", "not made again"),
            ({"transform": lambda b: doubled(b)}, "transform", "cannot be imported"),
            ({"callbacks": [Counting()]}, "callbacks", r"callbacks\.0 is a"),
            ({"callbacks": [Unequal()]}, "callbacks", "is not equal to what is read"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_cannot_be_made_without_code_is_asked_for(
        self, tmp_path, options, name, why
    ):
        one = fitted(**options)
        save(one, tmp_path, True)

        with pytest.raises(OptionError, match=f"pass {name} to Trainer.load.*{why}"):
            load(tmp_path, {})
        check_goes_on(load(tmp_path, options), one)

    def test_all_of_it_is_asked_for_at_once(self, tmp_path):
        save(fitted(lambda: Net(7), loss=lambda o, y: own_loss(o, y)), tmp_path, True)

        with pytest.raises(OptionError, match="pass model and loss to"):
            load(tmp_path, {})

    def test_what_is_passed_wins(self, tmp_path):
        save(fitted(seed=3), tmp_path, True)

        loaded = load(tmp_path, {"seed": 4, "loss": own_loss})

        assert loaded.arguments["seed"] == 4
        assert loaded.arguments["loss"] is own_loss

    def test_an_unknown_argument_is_refused(self, tmp_path):
        save(fitted(), tmp_path, True)

        with pytest.raises(OptionError, match="Trainer has no argument 'sed'"):
            load(tmp_path, {"sed": 4})

    @pytest.mark.parametrize(
        ("passed", "message"),
        [
            ({"model": Net}, "there is no layers.0.weight in the save"),
            ({"model": lambda: None}, "model must make a torch.nn.Module"),
            ({"model": lambda: 1 / 0}, "model failed: division by zero"),
            ({"optimizer": own_optimizer}, "the optimizer makes|optimizer makes a"),
            ({"optimizer": lambda p: None}, "optimizer must return"),
            ({"optimizer": lambda p: 1 / 0}, "optimizer failed on"),
            ({"scheduler": own_scheduler}, "scheduler makes a .*LambdaLR"),
        ],
    )
    def test_what_does_not_fit_what_was_saved_is_refused(
        self, tmp_path, passed, message
    ):
        one = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1))
        save(one, tmp_path, True)

        with pytest.raises((OptionError, SaveError), match=message):
            load(tmp_path, passed)


class TestTrust:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("model", Net),
            ("model", said_net),
            ("loss", said_loss),
            ("loss", nn.functional.mse_loss),
            ("loss", functools.partial(nn.functional.mse_loss, reduction="sum")),
            ("optimizer", functools.partial(torch.optim.SGD, lr=0.5)),
            ("scheduler", functools.partial(lr_scheduler.StepLR, step_size=2)),
            ("callbacks", [Own(5)]),
        ],
    )
    def test_what_says_that_it_makes_such_a_thing_needs_none(
        self, tmp_path, name, value
    ):
        loaded = back(fitted(**{name: value}), tmp_path, trusted=())

        read = loaded.arguments[name]
        same = read.func is value.func if hasattr(value, "func") else read == value
        assert same

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("model", make_net, "has no return annotation of a Module"),
            ("model", functools.partial(Net, 6), "would be called with arguments"),
            ("loss", own_loss, "has no return annotation of a Tensor"),
            ("step", own_step, "has no return annotation of a Tensor"),
            ("optimizer", own_optimizer, "has no return annotation of a Optimizer"),
            ("scheduler", own_scheduler, "has no return annotation of a LRScheduler"),
            ("transform", doubled, "has no return annotation of a tuple"),
            ("transform", Compose(doubled, doubled), "has no return annotation of a"),
        ],
    )
    def test_what_a_save_could_call_for_ill_is_asked_for(
        self, tmp_path, name, value, why
    ):
        one = fitted(**{name: value})
        save(one, tmp_path, True)

        with pytest.raises(
            OptionError, match=rf"pass {name} to Trainer.load .*{why}.*trusted=\['"
        ):
            load(tmp_path, {})
        check_goes_on(load(tmp_path, {name: value}), one)
        check_goes_on(load(tmp_path, {}, [__name__]), one)
        assert Trainer.load(tmp_path, client=False, trusted=[__name__]).history_

    @pytest.mark.parametrize(
        "trusted", ["my_nets", b"x", None, 3, [None], [nn], ["a b"], [""], ["a."]]
    )
    def test_what_is_no_list_of_modules_is_refused(self, tmp_path, trusted):
        save(fitted(), tmp_path, True)

        with pytest.raises(OptionError, match="trusted must be a list of names of"):
            load(tmp_path, {}, trusted)


class Changing(nn.Module):
    """Another model each time."""

    size = 2

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, self.size)


def test_a_class_that_has_changed_since_is_an_error_with_url_and_name(
    tmp_path, monkeypatch
):
    save(fitted(Changing), tmp_path, True)
    monkeypatch.setattr(Changing, "size", 3)

    with pytest.raises(SaveError, match=rf"cannot load {tmp_path}: layer.weight is"):
        load(tmp_path, {})


@pytest.mark.parametrize(
    "position",
    [
        {"tuple": [1, {"dict": [["step", 3]]}]},
        {"tuple": ["1", {"dict": []}]},
        {"tuple": [1]},
        {"tuple": [1, 2]},
    ],
)
def test_a_state_that_is_none_of_a_scheduler_is_refused(tmp_path, position):
    save(fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1)), tmp_path, True)
    index = json.loads((tmp_path / "trainer.json").read_text())
    index["content"]["moved"]["position"] = position
    (tmp_path / "trainer.json").write_bytes(signed(index))

    with pytest.raises(SaveError, match="scheduler"):
        load(tmp_path, {})


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        (("moved", "sent", "sent"), [[]]),
        (("moved", "sent", "sent"), [["*", -1.0, 0.5]]),
        (("moved", "sent", "steps"), 2.5),
        (("moved", "state"), {"dict": []}),
        (("arguments", "transform"), {"both": [{}]}),
        (("arguments", "transform"), {"normaliser": {"x": {"shift": 1}}}),
        (("arguments", "own"), {"value": 1}),
        (("arguments", "seed"), {"import": "torch.nn.modules.linear:Linear"}),
        (("model", "ties"), {"a": "b"}),
        (("model", "frozen"), [1]),
        (("epochs",), -1),
        (("class_count",), "2"),
        (("classes",), [1]),
        (("history",), {"dict": []}),
        (("history", "rows"), {"dict": []}),
        (("history", "stopping"), "patience"),
        (("history", "layout"), [["number", "<i8"]]),
        (("history", "layout"), [["loss", "|O8"]]),
        (("history", "layout"), 5),
    ],
)
def test_what_is_not_as_it_is_written_is_an_error_with_the_url(tmp_path, steps, wrong):
    save(fitted(), tmp_path, True)
    index = json.loads((tmp_path / "trainer.json").read_text())
    inner = index["content"]
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = wrong
    (tmp_path / "trainer.json").write_bytes(signed(index))

    with pytest.raises(SaveError, match=f"cannot load {tmp_path}: "):
        load(tmp_path, {})


def test_a_trainer_without_a_fit_is_not_saved(tmp_path):
    trainer = Trainer(nn.Linear(2, 1), nn.MSELoss(), torch.optim.SGD, client=False)

    with pytest.raises(OptionError, match="no model_ yet; call fit first"):
        trainer.save(tmp_path)


def test_nothing_there_is_an_error_with_the_url(tmp_path):
    with pytest.raises(SaveError, match=rf"cannot read {tmp_path}"):
        Trainer.load(tmp_path)
