"""A fitted trainer, saved and loaded: all of it comes back, or is asked for."""

import functools
import inspect
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, field, is_dataclass

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
from daskdl.keras import CrossEntropyOfProbabilities, KerasModule
from daskdl.saving.trainer_state import KNOWN, NAMES, load, save
from tests.support.keras_models import small
from tests.support.saves import fitted, layers, signed


class Net(nn.Module):
    """With every kind of state that is a tensor."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        self.tied = nn.Linear(3, width)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        return self.layers(x)


def make_net():
    return Net(5)


def own_loss(output, labels):
    return (output - labels).abs().mean()


def own_step(model, batch):
    return model(batch[0]).mean()


class OwnSGD(torch.optim.SGD):
    pass


def own_optimizer(parameters):
    return OwnSGD(parameters, lr=0.1)


def own_scheduler(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def doubled(batch):
    return batch[0] * 2, batch[1]


@dataclass(frozen=True)
class Own(Callback):
    number: int = 3
    kept: list = field(default_factory=list, init=False)


@dataclass(frozen=True)
class Inexact(Callback):
    """What is read of it is not what was written."""

    number: int = 3

    def __post_init__(self):
        object.__setattr__(self, "number", self.number + 1)


@dataclass
class Thawed(Callback):
    rate: float = 0.5


class Counting(Callback):
    """Keeps what it has seen, so it is no plain value."""


def back(one, url, optimizer=True, trusted=("tests",), **passed):
    save(one, str(url), optimizer)
    return load(str(url), passed, trusted)


def states(optimizer):
    return optimizer.state_dict()["state"]


def index_of(folder):
    return json.loads((folder / "trainer.json").read_text())


def change(folder, steps, wrong):
    """Write something else into the JSON of a save, with a checksum that fits."""
    index = index_of(folder)
    inner = index["content"]
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = wrong
    (folder / "trainer.json").write_bytes(signed(index))


def check_goes_on(loaded, one):
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    ours, theirs = one.fit_state.optimizer, loaded.fit_state.optimizer
    groups = theirs.optimizer.state_dict()["param_groups"]
    assert groups == ours.optimizer.state_dict()["param_groups"]
    assert theirs.made == ours.made
    for number, entries in states(ours.optimizer).items():
        for name, value in entries.items():
            read = states(theirs.optimizer)[number][name]
            assert read.dtype == value.dtype
            assert torch.equal(read, value), (number, name)
    assert theirs.rate.position() == ours.rate.position()


class TestWhatComesBack:
    def test_a_trainer_comes_back_whole(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))
        one.history.stopping = Stopping("loss", "target", "", {0: 2.0}, 0, 2.0, True)

        loaded = back(one, tmp_path)

        check_goes_on(loaded, one)
        assert loaded.fit_state.compression == one.fit_state.compression
        assert (loaded.fit_state.epochs, loaded.fit_state.class_count) == (2, 2)
        assert loaded.classes == ["no", "yes"]
        assert math.isnan(loaded.history[0]["loss"])
        assert loaded.history[0]["waits"] == {"end": 0.5}
        assert loaded.history.stopping == one.history.stopping
        assert repr(list(loaded.history.steps)) == repr(list(one.history.steps))

    def test_every_argument_of_a_trainer_is_saved(self, tmp_path):
        save(fitted(), tmp_path, True)

        fields = {f for f in Trainer.__dataclass_fields__.values() if f.init}
        names = {f.name for f in fields} - {"_", "client"}
        assert set(NAMES) == names
        assert set(index_of(tmp_path)["content"]["arguments"]) == names

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("device", "cpu"),
            ("seed", 2**63 - 1),
            ("progress", False),
            ("autocast", torch.bfloat16),
            ("clip_grad_norm", 0.1),
            ("telemetry_every", None),
            ("callbacks", [FailureInjection("sleep", steps=[3], seconds=0.1), Own(5)]),
            ("callbacks", [Checkpoint("s3://bucket/x", 2, keep_best="loss")]),
            ("optimizer", own_optimizer),
            ("loss", own_loss),
            ("loss", nn.functional.mse_loss),
            ("step", own_step),
            ("scheduler", own_scheduler),
            ("transform", doubled),
            ("transform", Compose(doubled, doubled)),
            ("master", GradientSharing(LinkThreshold(share=0.5), KeepResidual())),
            (
                "master",
                GradientSharing({"*.bias": FixedThreshold(), "*": AdaptiveThreshold()}),
            ),
            ("master", GradientSharing(max_staleness=None, update_scale=0.5)),
        ],
    )
    def test_an_argument_comes_back_equal(self, tmp_path, name, value):
        loaded = back(fitted(**{name: value}), tmp_path)

        assert loaded.arguments[name] == value

    def test_a_class_of_daskdl_may_move_to_another_module(self):
        bases = (Callback, daskdl.TrainingMaster, daskdl.ThresholdAlgorithm)
        kinds = [kind for kind in vars(daskdl).values() if isinstance(kind, type)]
        bases = (*bases, daskdl.ResidualPostProcessor)
        written = {k for k in kinds if issubclass(k, bases) and is_dataclass(k)}

        assert len(written) >= 10
        assert written <= set(KNOWN.values())

    def test_a_torch_device_comes_back_as_its_name(self, tmp_path):
        loaded = back(fitted(device=torch.device("cpu")), tmp_path)

        assert loaded.arguments["device"] == "cpu"

    @pytest.mark.parametrize("rule", [Standardize(), MinMax(-1, 1)])
    def test_a_normalizer_comes_back_equal(self, tmp_path, rule):
        x = {"a": np.array([[0.1, 7], [3, 1e-9]]), 3: np.arange(2.0)[:, None]}
        transform = rule.fit(x, client=False)

        loaded = back(fitted(transform=transform), tmp_path)

        assert loaded.arguments["transform"] == transform

    @pytest.mark.parametrize(
        "model",
        [Net, make_net, functools.partial(Net, width=6)],
        ids=["class", "function", "partial"],
    )
    def test_a_model_gets_all_that_its_code_does_not_make(self, tmp_path, model):
        one = fitted(model)
        one.model.hidden.fill_(7)
        one.model.cache = torch.ones(3)
        one.model.tied.bias.requires_grad_(False)
        one.model.layers[1].eval()

        module = back(one, tmp_path, optimizer=False).model

        for name, tensor in one.model.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor), name
        assert module.hidden.tolist() == [7, 7]
        assert module.cache.tolist() == [1, 1, 1]
        assert module.tied.weight is module.layers[0].weight
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        assert frozen == ["tied.bias"]
        assert (module.training, module.layers[1].training) == (True, False)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_a_model_in_another_precision_comes_back(self, tmp_path, dtype):
        one = fitted(lambda: layers().to(dtype))

        check_goes_on(back(one, tmp_path, model=one.arguments["model"]), one)

    def test_what_was_loaded_can_be_saved_again(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.MultiStepLR(o, [1, 5]))

        loaded = back(back(one, tmp_path), tmp_path)

        check_goes_on(loaded, one)
        kinds = Counter(path.suffix for path in tmp_path.iterdir())
        assert kinds == {".json": 1, ".safetensors": 3}  # nothing is pickled

    def test_random_numbers_go_on_as_if_nothing_had_been_loaded(self, tmp_path):
        save(fitted(make_net), tmp_path, True)
        state = torch.get_rng_state()

        load(tmp_path, {}, ["tests"])

        assert torch.equal(torch.get_rng_state(), state)

    def test_weights_are_a_state_dict_for_others(self, tmp_path):
        one = fitted()
        save(one, tmp_path, True)
        (file,) = tmp_path.glob("model-*.safetensors")

        module = layers()
        module.load_state_dict(safetensors.torch.load_file(file))

        for name, tensor in one.model.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor)


LOSSES = [
    nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), label_smoothing=0.1),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0])),
    nn.NLLLoss(ignore_index=1),
    nn.PoissonNLLLoss(log_input=False, full=True),
    nn.HuberLoss("sum", delta=0.5),
    CrossEntropyOfProbabilities(torch.tensor([1.0, 3.0])),
]
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    lambda p: torch.optim.RMSprop(p, centered=True),
    lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.Rprop(p, etas=(0.4, 1.3)),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.SGD([{"params": [one]} for one in p], lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(
        [{"params": p[::2], "lr": 0.5}, {"params": p[1::2], "weight_decay": 0.1}]
    ),
    lambda p: torch.optim.Adam(p[1:], lr=0.1),
]
SCHEDULERS = [
    lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 8]),
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.ConstantLR(o, 0.5, 7),
    lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=9),
    lambda o: lr_scheduler.PolynomialLR(o, 9, power=2.0),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-3),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, T_mult=2),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=1e-4, mode="max"),
]


class TestWhatNeverHasToBePassed:
    """Models are passed here, and nothing is trusted."""

    def loaded(self, tmp_path, **options):
        one = fitted(**options)
        loaded = back(one, tmp_path, trusted=(), model=layers)
        check_goes_on(loaded, one)
        return one, loaded

    @pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
    def test_losses_of_torch_and_daskdl(self, tmp_path, loss):
        _, loaded = self.loaded(tmp_path, loss=loss)

        read = loaded.arguments["loss"]
        names = inspect.signature(type(loss)).parameters.keys()
        for name in names - {"size_average", "reduce"}:
            ours, theirs = getattr(loss, name), getattr(read, name)
            assert (
                torch.equal(ours, theirs)
                if name[-6:] == "weight" and (ours is not None)
                else ours == theirs
            ), name

    @pytest.mark.parametrize("make", OPTIMIZERS)
    def test_optimizers_of_torch(self, tmp_path, make):
        one, loaded = self.loaded(tmp_path, optimizer=make)

        parameters = [p for p in one.model.parameters() if p.requires_grad]
        made, again = make(parameters), loaded.arguments["optimizer"](parameters)
        assert type(again) is type(made)
        assert again.defaults == made.defaults
        for ours, theirs in zip(made.param_groups, again.param_groups, strict=True):
            assert list(map(id, ours.pop("params"))) == [
                id(p) for p in theirs.pop("params")
            ]
            assert ours == theirs

    @pytest.mark.parametrize("make", SCHEDULERS)
    def test_schedulers_of_torch(self, tmp_path, make):
        _, loaded = self.loaded(tmp_path, scheduler=make, optimizer=OPTIMIZERS[0])

        both = [make, loaded.arguments["scheduler"]]
        made, again = (
            one(OPTIMIZERS[0]([nn.Parameter(torch.zeros(2))])) for one in both
        )
        for step in range(12):
            for one in (made, again):
                one.optimizer.step()
                plateau = isinstance(one, lr_scheduler.ReduceLROnPlateau)
                one.step(1.0) if plateau else one.step()
            assert again.get_last_lr() == made.get_last_lr(), step

    def test_a_keras_model(self, tmp_path):
        one = fitted(lambda: small())

        loaded = back(one, tmp_path, trusted=())

        check_goes_on(loaded, one)
        assert type(loaded.model) is KerasModule
        assert loaded.model.get_config() == one.model.get_config()

    def test_partials_of_functions_of_torch(self, tmp_path):
        loss = functools.partial(nn.functional.mse_loss, reduction="sum")

        _, loaded = self.loaded(tmp_path, loss=loss)

        read = loaded.arguments["loss"]
        assert (read.func, read.keywords) == (loss.func, loss.keywords)


class TestWithoutOptimizer:
    def test_optimizer_scheduler_and_thresholds_begin_anew(self, tmp_path):
        one = fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))

        loaded = back(one, tmp_path, optimizer=False)

        trained = loaded.fit_state.optimizer
        assert states(trained.optimizer) == {}
        assert trained.optimizer.param_groups[0]["lr"] == 0.01
        assert trained.rate.position()[0] == 0
        assert loaded.fit_state.compression is None
        assert loaded.fit_state.epochs == 2
        assert not list(tmp_path.glob("optimizer-*"))

    def test_anything_but_true_and_false_is_refused(self, tmp_path):
        with pytest.raises(OptionError, match="optimizer must be True or False, got 1"):
            save(fitted(), tmp_path, 1)

    def test_a_state_that_is_no_plain_value_is_refused_by_name(self, tmp_path):
        one = fitted()
        optimizer = one.fit_state.optimizer.optimizer
        optimizer.state[next(one.model.parameters())]["own"] = object()

        with pytest.raises(
            OptionError, match=r"state\.state\.0\.own is a builtins.obj"
        ):
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


def more_attributes():
    loss = nn.MSELoss()
    loss.own = 3
    return loss


def hooked():
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: None)
    return loss


class TestWhatHasToBePassed:
    @pytest.mark.parametrize(
        ("options", "name", "why"),
        [
            ({"model": lambda: Net(7)}, "model", "<lambda>' cannot be imported by"),
            ({"model": Net(7)}, "model", r"model is a tests.*Net, which cannot be"),
            ({"loss": lambda o, y: own_loss(o, y)}, "loss", "cannot be imported"),
            ({"loss": more_attributes()}, "loss", "own of the loss is no argument"),
            ({"loss": hooked()}, "loss", "_forward_hooks of the loss is no argument"),
            ({"step": lambda m, b: own_step(m, b)}, "step", "cannot be imported"),
            (
                {"optimizer": lambda p: own_optimizer(p)},
                "optimizer",
                "OwnSGD, which is not of torch, and .* cannot be imported",
            ),
            (
                {"scheduler": lambda o: own_scheduler(o)},
                "scheduler",
                "LambdaLR",
            ),
            (
                {"scheduler": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9)},
                "scheduler",
                "OneCycleLR",
            ),
            ({"transform": lambda b: doubled(b)}, "transform", "cannot be imported"),
            ({"callbacks": [Counting()]}, "callbacks", r"callbacks\.0 is a"),
            ({"callbacks": [Thawed()]}, "callbacks", r"callbacks\.0 is a"),
            ({"callbacks": [Inexact()]}, "callbacks", "is read in its place"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_cannot_be_made_without_code_is_asked_for(
        self, tmp_path, options, name, why
    ):
        one = fitted(**options)
        save(one, tmp_path, True)

        with pytest.raises(
            OptionError, match=rf"pass {name} to(.|\n)*- {name}: .*{why}"
        ):
            load(tmp_path, {}, ["tests"])
        check_goes_on(load(tmp_path, options, ["tests"]), one)

    def test_all_of_it_is_asked_for_at_once(self, tmp_path):
        save(fitted(lambda: Net(7), loss=lambda o, y: own_loss(o, y)), tmp_path, True)

        with pytest.raises(OptionError, match=r"pass model and loss to(.|\n)*\n- loss"):
            Trainer.load(tmp_path)

    def test_what_is_passed_wins_and_none_does_not(self, tmp_path):
        save(fitted(seed=3, loss=nn.MSELoss()), tmp_path, True)

        loaded = Trainer.load(
            tmp_path, model=layers, loss=own_loss, optimizer=None, seed=4, client=False
        )

        assert (loaded.seed, loaded.loss) == (4, own_loss)
        assert type(loaded.optimizer_) is torch.optim.Adam

    def test_an_unknown_argument_is_refused(self, tmp_path):
        save(fitted(), tmp_path, True)

        with pytest.raises(OptionError, match="Trainer has no argument 'sed'"):
            Trainer.load(tmp_path, sed=4)

    @pytest.mark.parametrize(
        ("passed", "message"),
        [
            ({"model": Net}, r"count is missing in the save, and int64 \(1,\) in the"),
            (
                {"model": lambda: nn.Sequential(layers())},
                r"0.0.weight is missing in the save",
            ),
            ({"model": lambda: layers().double()}, r"float32 .* and float64"),
            ({"model": lambda: layers()[:1]}, r"1.bias is .* missing in the model"),
            ({"model": lambda: None}, "model must make a torch.nn.Module"),
            ({"model": lambda: 1 / 0}, "model failed: division by zero"),
            ({"optimizer": own_optimizer}, "optimizer makes a .*OwnSGD, and the saved"),
            (
                {"optimizer": lambda p: torch.optim.Adam(p[1:])},
                "optimizer has other parameters",
            ),
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
            load(tmp_path, passed, ["tests"])


class Untied(Net):
    def __init__(self):
        super().__init__()
        self.tied.weight = nn.Parameter(torch.ones(4, 3))


class WithoutBuffer(Net):
    def __init__(self):
        super().__init__()
        del self.hidden


class Refusing(Net):
    def load_state_dict(self, *_, **__):
        raise RuntimeError("not now")


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Untied, "tied.weight is tied to layers.0.weight in the save, and float32"),
        (WithoutBuffer, "hidden is no buffer of the model"),
        (Refusing, "the model refuses its state: not now"),
        (lambda: Extra(3, 2), "_extra_state of the model's state is a dict"),
    ],
)
def test_a_model_that_is_not_alike_is_refused_by_what_differs(tmp_path, model, message):
    save(fitted(Net), tmp_path, True)

    with pytest.raises(SaveError, match=rf"cannot load {tmp_path}: {message}"):
        load(tmp_path, {"model": model})


def test_a_state_of_a_model_that_is_no_tensor_is_refused_by_name(tmp_path):
    one = fitted(steps=0)
    one.model[0] = Extra(3, 4)

    with pytest.raises(OptionError, match="_extra_state of the model's state is a"):
        save(one, tmp_path, True)


def put_module(folder, name, monkeypatch):
    """A module that can be imported, and leaves a file when it is."""
    (folder / f"{name}.py").write_text(
        "import pathlib\nfrom torch import nn\n"
        "pathlib.Path(__file__).with_suffix('.ran').touch()\n"
        "class Net(nn.Linear):\n    def __init__(self): super().__init__(3, 2)\n"
        "Renamed = nn.Linear\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return folder / f"{name}.ran"


class TestTrust:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("model", Net),
            ("model", make_net),
            ("model", functools.partial(Net, 6)),
            ("loss", own_loss),
            ("step", own_step),
            ("optimizer", own_optimizer),
            ("scheduler", own_scheduler),
            ("transform", doubled),
            ("transform", Compose(doubled, doubled)),
            ("callbacks", [Own(5)]),
        ],
    )
    def test_code_is_asked_for_unless_it_is_trusted(self, tmp_path, name, value):
        one = fitted(**{"model": layers, name: value})
        save(one, tmp_path, True)
        others = {} if name == "model" else {"model": layers}

        with pytest.raises(
            OptionError, match=rf"pass {name} to(.|\n)*trusted=\['tests'"
        ):
            load(tmp_path, others)
        check_goes_on(load(tmp_path, {name: value, **others}), one)
        check_goes_on(load(tmp_path, others, [__name__]), one)

    @pytest.mark.parametrize("trusted", [[], ["booby.more"], ["boo"]])
    def test_a_module_is_imported_only_if_it_is_trusted(
        self, tmp_path, monkeypatch, trusted
    ):
        ran = put_module(tmp_path, "booby", monkeypatch)
        folder = tmp_path / "save"
        save(fitted(lambda: nn.Linear(3, 2)), folder, True)
        change(folder, ("arguments", "model"), {"value": {"import": "booby:Net"}})

        with pytest.raises(OptionError, match=r"pass trusted=\['booby'\]"):
            load(folder, {}, trusted)
        assert not ran.exists()
        assert "booby" not in sys.modules

        loaded = load(folder, {}, ["booby"])
        assert type(loaded.model).__name__ == "Net"
        assert ran.exists()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("os:system", "standard library"),
            ("builtins:eval", "standard library"),
            ("__main__:Net", "script or notebook"),
            ("nowhere.at_all:Net", "cannot be imported: ModuleNotFoundError"),
            ("sound:Missing", "cannot be imported: AttributeError"),
            ("sound:Renamed", "no class or function of that module"),
            ("sound:number", "no class or function of that module"),
            ("sound:pathlib.os.system", "no class or function of that module"),
            ("../evil:Net", "cannot be imported by that name"),
            (".evil:Net", "cannot be imported by that name"),
            ("a:b:c", "cannot be imported by that name"),
            ("a" * 500 + ":b", "cannot be imported by that name"),
            ("", "cannot be imported by that name"),
        ],
    )
    def test_a_name_that_no_save_has_is_refused(
        self, tmp_path, monkeypatch, name, message
    ):
        put_module(tmp_path, "sound", monkeypatch)
        folder = tmp_path / "save"
        save(fitted(), folder, True)

        for kind in ({"import": name}, {"object": {"class": name, "fields": {}}}):
            change(folder, ("arguments", "model"), {"value": kind})
            with pytest.raises(SaveError, match=message):
                load(folder, {}, ["nowhere", "os", "builtins", "__main__", "sound"])

    @pytest.mark.parametrize(
        "trusted", ["my_nets", b"x", None, 3, [None], [nn], ["a b"], [""], ["a."]]
    )
    def test_what_is_no_list_of_modules_is_refused(self, tmp_path, trusted):
        save(fitted(), tmp_path, True)

        with pytest.raises(OptionError, match="trusted must be a list of names of"):
            Trainer.load(tmp_path, trusted=trusted)


def deep(levels=70):
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        (("fit",), {"dict": []}),
        (("fit", "dict", 3, 1), {"dict": []}),
        (("fit", "dict", 4, 1), {"tuple": ["StepLR", 1]}),
        (("fit", "dict", 4, 1, "tuple", 1), "1"),
        (("fit", "dict", 4, 1, "tuple", 2), {"dict": [["step", 3]]}),
        (("fit", "dict", 5, 1), {"dict": [["*", {"tuple": [-1.0, 0.5]}]]}),
        (("fit", "dict", 6, 1), 2.5),
        (("fit", "dict", 7, 1), {"tuple": [{"tensor": "x"}, 1.0]}),
        (("arguments", "own"), {"value": 1}),
        (("arguments", "seed"), {"import": "torch.nn.modules.linear:Linear"}),
        *((("arguments", "loss"), {"value": value}) for value in (
            {"float": "1"},
            {"tuple": 3},
            {"dict": [[1, 2, 3]]},
            {"dict": [[[], 2]]},
            {"dtype": "Tensor"},
            {"dtype": 3},
            {"tensor": "x"},
            {"code": "x"},
            {"float": "nan", "tuple": []},
            {"object": {"class": "AdaptiveThreshold", "fields": {"initial": -1}}},
            {"object": {"class": "AdaptiveThreshold", "fields": {"other": 1}}},
            {"object": {"class": "AdaptiveThreshold", "fields": []}},
            {"object": {"class": f"{__name__}:Thawed", "fields": {}}},
            {"loss": {"class": "Linear", "arguments": {"dict": []}}},
            {"loss": {"class": "MSELoss", "arguments": {"dict": [["own", 1]]}}},
            {"torch": "hub.load"},
            {"torch": "nn.functional.torch"},
            {"normalization": {"x": {"shift": 1}}},
            {"keras": {"class_name": "Lambda", "config": {}}},
            deep(),
        )),
        (("model", "ties"), {"a": "b"}),
        (("model", "frozen"), 1),
        (("model",), {}),
        (("epochs",), -1),
        (("class_count",), "2"),
        (("classes",), [1]),
        (("history",), {"dict": []}),
        (("history", "rows"), {"dict": []}),
        (("history", "stopping"), "patience"),
        (("history", "step_columns"), [["number", "<i8"]]),
        (("history", "step_columns"), [["loss", "|O8"]]),
        (("history", "step_columns"), 5),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_not_as_it_is_written_is_an_error_with_the_url(tmp_path, steps, wrong):
    save(fitted(scheduler=lambda o: lr_scheduler.StepLR(o, 1)), tmp_path, True)
    change(tmp_path, steps, wrong)

    with pytest.raises(SaveError, match=f"cannot load {tmp_path}: "):
        load(tmp_path, {}, ["tests"])


def test_tensors_with_names_that_look_alike_are_told_apart(tmp_path):
    one = fitted()
    optimizer = one.fit_state.optimizer.optimizer
    state = optimizer.state[next(one.model.parameters())]
    state |= {"a.b": {"c": torch.ones(2)}, "a": {"b.c": torch.zeros(1)}}

    read = states(back(one, tmp_path).fit_state.optimizer.optimizer)[0]

    assert (read["a.b"]["c"].tolist(), read["a"]["b.c"].tolist()) == ([1, 1], [0])


def test_a_trainer_without_a_fit_is_not_saved(tmp_path):
    trainer = Trainer(nn.Linear(2, 1), nn.MSELoss(), torch.optim.SGD, client=False)

    with pytest.raises(OptionError, match="no model_ yet; call fit first"):
        trainer.save(tmp_path)


def test_nothing_there_is_an_error_with_the_url(tmp_path):
    with pytest.raises(SaveError, match=rf"cannot read {tmp_path}"):
        Trainer.load(tmp_path)
