"""A fitted trainer, saved and loaded: all of it comes back, or is asked for."""

import functools
import math
import sys
from collections import Counter
from dataclasses import dataclass, field, is_dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import daskdl
from daskdl import (
    Callback,
    Checkpoint,
    EarlyStopping,
    FixedThreshold,
    GradientSharing,
    KeepResidual,
    LayerMonitor,
    OptionError,
    SaveError,
    TargetSparsityThreshold,
    Trainer,
)
from daskdl.data import MinMax, Standardize
from daskdl.data.checks import optimizer_function
from daskdl.data.inputs import Compose
from daskdl.keras import CrossEntropyOfProbabilities
from daskdl.observe.history import Stopping
from daskdl.training import trainer_state
from daskdl.training.trainer_state import KNOWN, save
from tests.support.keras_models import small
from tests.support.manifests import at
from tests.support.saves import fitted, layers, load, tamper


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


def own_loss(output, labels):
    return (output - labels).abs().mean()


def own_step(model, batch):
    return model(batch[0]).mean()


class OwnSGD(torch.optim.SGD):
    pass


def own_optimizer(parameters):
    return OwnSGD(parameters, lr=0.1)


class Adam(torch.optim.Adam):
    """Of the name that torch's own has."""


def own_adam(parameters):
    return Adam(parameters)


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


TABLE = {"a": np.array([[0.1, 7], [3, 1e-9]]), 3: np.arange(2.0)[:, None]}


def stepped(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def back(saved, url, optimizer=True, trusted=("tests",), **passed):
    save(saved, str(url), optimizer)
    return load(str(url), passed, trusted)


def states(optimizer):
    return optimizer.state_dict()["state"]


def change(folder, steps, wrong):
    """Put something else into the content of a save."""

    def put(content):
        at(content, steps[:-1])[steps[-1]] = wrong

    tamper(folder, put)


def check_goes_on(loaded, saved):
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    ours, theirs = saved.fit_state.optimizer, loaded.fit_state.optimizer
    groups = theirs.optimizer.state_dict()["param_groups"]
    assert groups == ours.optimizer.state_dict()["param_groups"]
    assert theirs.initial == ours.initial
    for number, entries in states(ours.optimizer).items():
        for name, value in entries.items():
            read = states(theirs.optimizer)[number][name]
            assert read.dtype == value.dtype
            assert torch.equal(read, value), (number, name)
    assert theirs.rate.carried() == ours.rate.carried()


def test_all_state_is_restored_and_can_be_saved_again(tmp_path):
    saved = fitted(scheduler=stepped)
    saved.history.stopping = Stopping("loss", "target", "", {0: 2.0}, 0, 2.0, True)

    for loaded in (back(saved, tmp_path), back(back(saved, tmp_path), tmp_path)):
        check_goes_on(loaded, saved)
        assert loaded.fit_state.carried == saved.fit_state.carried
        assert (loaded.fit_state.epochs, loaded.fit_state.class_count) == (2, 2)
        assert loaded.classes == ["no", "yes"]
        assert math.isnan(loaded.history[0]["loss"])
        assert loaded.history[0]["waits"] == {"end": 0.5}
        assert loaded.history.stopping == saved.history.stopping
        assert repr(list(loaded.history.steps)) == repr(list(saved.history.steps))
        assert repr(list(loaded.history.layers)) == repr(list(saved.history.layers))
        assert list(loaded.history.timeline) == list(saved.history.timeline)
        assert loaded.history.run == saved.history.run
    kinds = Counter(path.suffix for path in tmp_path.iterdir())
    assert kinds == {".json": 1, ".safetensors": 3}  # nothing is pickled


def test_classes_of_daskdl_are_saved_without_their_module():
    bases = (Callback, daskdl.TrainingMaster, daskdl.ThresholdAlgorithm)
    bases = (*bases, daskdl.ResidualPostProcessor)
    kinds = [kind for kind in vars(daskdl).values() if isinstance(kind, type)]
    written = {k for k in kinds if issubclass(k, bases) and is_dataclass(k)}

    assert len(written) >= 10
    assert written <= set(KNOWN.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cpu"),
        ("seed", 2**63 - 1),
        ("autocast", torch.bfloat16),
        ("telemetry_every", None),
        ("callbacks", [EarlyStopping("loss", patience=3), Own(5)]),
        ("callbacks", [Checkpoint("s3://bucket/x", 2, keep_best="loss")]),
        ("callbacks", [LayerMonitor(7)]),
        ("optimizer", own_optimizer),
        ("loss", own_loss),
        ("loss", nn.functional.mse_loss),
        ("step", own_step),
        ("optimizer", "adamw"),
        ("scheduler", own_scheduler),
        ("transform", Compose(doubled, doubled)),
        ("transform", Standardize().fit(TABLE, client=False)),
        ("transform", MinMax(-1, 1).fit(TABLE, client=False)),
        (
            "master",
            GradientSharing(TargetSparsityThreshold(target=0.01), KeepResidual()),
        ),
        (
            "master",
            GradientSharing({"0.*": FixedThreshold(), "*": FixedThreshold(0.5)}),
        ),
        ("master", GradientSharing(max_staleness=None, update_scale=0.5)),
    ],
)
def test_arguments_are_restored(tmp_path, name, value):
    argument = torch.device(value) if name == "device" else value

    assert back(fitted(**{name: argument}), tmp_path).arguments[name] == value


@pytest.mark.parametrize("kind", ["sgd", torch.optim.SGD, OwnSGD])
def test_a_rate_is_restored_with_its_optimizer(tmp_path, kind):
    loaded = back(fitted(optimizer=kind, lr=0.25), tmp_path)

    make = optimizer_function(*(loaded.arguments[n] for n in ("optimizer", "lr")))
    assert make([nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.25


@pytest.mark.parametrize("model", [Net, functools.partial(Net, width=6)])
def test_buffers_frozen_parameters_modes_and_ties_are_restored(tmp_path, model):
    saved, drawn = fitted(model), torch.get_rng_state()
    saved.model.hidden.fill_(7)
    saved.model.cache = torch.ones(3)
    saved.model.tied.bias.requires_grad_(False)
    saved.model.layers[1].eval()

    module = back(saved, tmp_path, optimizer=False).model

    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.hidden.tolist() == [7, 7]
    assert module.cache.tolist() == [1, 1, 1]
    assert module.tied.weight is module.layers[0].weight
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["tied.bias"]
    assert (module.training, module.layers[1].training) == (True, False)
    assert torch.equal(torch.get_rng_state(), drawn)  # as if nothing had been made


LOSSES = [
    nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), label_smoothing=0.1),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0])),
    nn.NLLLoss(ignore_index=1),
    nn.PoissonNLLLoss(log_input=False, full=True),
    nn.HuberLoss("sum", delta=0.5),
    CrossEntropyOfProbabilities(torch.tensor([1.0, 3.0])),
    functools.partial(nn.functional.mse_loss, reduction="sum"),
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
    lambda p: torch.optim.SGD(
        [{"params": [parameter]} for parameter in p], lr=0.1, momentum=0.9
    ),
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


class TestSavedWithoutCode:
    """Models are passed here, and nothing is trusted."""

    def loaded(self, tmp_path, **options):
        saved = fitted(**options)
        loaded = back(saved, tmp_path, trusted=(), model=layers)
        check_goes_on(loaded, saved)
        return loaded.arguments

    @pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
    def test_losses_of_torch_and_daskdl(self, tmp_path, loss):
        read = self.loaded(tmp_path, loss=loss)["loss"]

        assert repr(read) == repr(loss)
        for name, ours in vars(loss).items():
            assert name == "_buffers" or getattr(read, name) == ours, name
        for name, ours in vars(loss).get("_buffers", {}).items():
            assert ours is None or torch.equal(getattr(read, name), ours), name

    @pytest.mark.parametrize("make", OPTIMIZERS)
    def test_optimizers_of_torch(self, tmp_path, make):
        parameters = list(layers().parameters())

        read = self.loaded(tmp_path, optimizer=make)["optimizer"]

        optimizer, again = make(parameters), read(parameters)
        assert type(again) is type(optimizer)
        assert again.defaults == optimizer.defaults
        for ours, theirs in zip(
            optimizer.param_groups, again.param_groups, strict=True
        ):
            ids = [[*map(id, group.pop("params"))] for group in (ours, theirs)]
            assert ids[0] == ids[1]
            assert ours == theirs

    @pytest.mark.parametrize("make", SCHEDULERS)
    def test_schedulers_of_torch(self, tmp_path, make):
        options = {"scheduler": make, "optimizer": OPTIMIZERS[0]}

        read = self.loaded(tmp_path, **options)["scheduler"]

        optimizers = [OPTIMIZERS[0]([nn.Parameter(torch.zeros(2))]) for _ in range(2)]
        scheduler, again = make(optimizers[0]), read(optimizers[1])
        for step in range(12):
            for each in (scheduler, again):
                each.optimizer.step()
                plateau = isinstance(each, lr_scheduler.ReduceLROnPlateau)
                each.step(1.0) if plateau else each.step()
            assert again.get_last_lr() == scheduler.get_last_lr(), step

    def test_a_keras_model(self, tmp_path):
        saved = fitted(lambda: small())

        loaded = back(saved, tmp_path, trusted=())

        check_goes_on(loaded, saved)
        assert type(loaded.model) is type(saved.model)
        assert loaded.model.get_config() == saved.model.get_config()


def test_without_optimizer_state_the_next_fit_starts_with_new_state(tmp_path):
    loaded = back(fitted(scheduler=stepped), tmp_path, optimizer=False)

    trained = loaded.fit_state.optimizer
    assert states(trained.optimizer) == {}
    assert trained.optimizer.param_groups[0]["lr"] == 0.01
    assert trained.rate.values()["count"] == 0
    assert loaded.fit_state.carried == {}
    assert loaded.fit_state.epochs == 2
    assert not list(tmp_path.glob("optimizer-*"))


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


def with_odd_state():
    saved = fitted()
    optimizer = saved.fit_state.optimizer.optimizer
    optimizer.state[next(saved.model.parameters())]["own"] = object()
    return saved


def with_another_optimizer():
    saved = fitted()
    saved.arguments["optimizer"] = own_optimizer
    return saved


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_odd_state, r"optimizer\.state\.0\.own is a builtins"),
        (with_another_optimizer, "save with optimizer=False"),
        (lambda: fitted(lambda: Extra(3, 2), 0), "_extra_state of the model's state"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_by_name(tmp_path, make, message):
    with pytest.raises(OptionError, match=message):
        save(make(), tmp_path, True)
    assert not list(tmp_path.iterdir())


def test_state_of_a_replaced_scheduler_is_not_saved(tmp_path):
    saved = fitted(scheduler=stepped)
    saved.arguments["scheduler"] = own_scheduler

    assert back(saved, tmp_path).fit_state.optimizer.rate.values()["count"] == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda url: Trainer.load(url), SaveError, "cannot read .*no such"),
        (lambda url: Trainer.load(url, sed=4), OptionError, "has no argument 'sed'"),
        (lambda url: save(fitted(), url, 1), OptionError, "True or False, got 1"),
        (
            lambda url: Trainer(layers, nn.MSELoss(), torch.optim.SGD).save(url),
            OptionError,
            "no model_ yet; call fit first",
        ),
    ],
)
def test_invalid_calls_are_refused(tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(tmp_path)


def more_attributes():
    loss = nn.MSELoss()
    loss.own = 3
    return loss


def hooked():
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: None)
    return loss


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("model", lambda: Net(7), "<lambda>' cannot be imported by"),
        ("model", Net(7), r"model is a tests.*Net, and a save contains neither code"),
        ("loss", lambda o, y: own_loss(o, y), "cannot be imported"),
        ("loss", more_attributes(), "the loss has an attribute own that no argument"),
        ("loss", hooked(), "the loss has an attribute _forward_hooks that no argument"),
        ("step", lambda m, b: own_step(m, b), "cannot be imported"),
        ("optimizer", lambda p: own_optimizer(p), "OwnSGD, not a class of torch"),
        ("scheduler", lambda o: own_scheduler(o), "LambdaLR"),
        ("scheduler", lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9), "OneCycleLR"),
        ("transform", lambda b: doubled(b), "cannot be imported"),
        ("callbacks", [Thawed()], r"callbacks\.0 is a"),
        ("callbacks", [Inexact()], "loading would return"),
    ],
)
def test_arguments_that_need_code_are_requested(tmp_path, name, value, why):
    saved = fitted(**{name: value})
    save(saved, tmp_path, True)

    with pytest.raises(OptionError, match=rf"pass {name} to(.|\n)*- {name}: .*{why}"):
        load(tmp_path, {}, ["tests"])
    check_goes_on(load(tmp_path, {name: value}, ["tests"]), saved)


def test_passed_arguments_replace_saved_ones(tmp_path):
    save(fitted(seed=3, loss=lambda o, y: own_loss(o, y)), tmp_path, True)

    with pytest.raises(OptionError, match=r"pass model and loss to(.|\n)*\n- loss"):
        Trainer.load(tmp_path)
    loaded = Trainer.load(
        tmp_path, model=layers, loss=own_loss, optimizer=None, seed=4, client=False
    )

    assert (loaded.seed, loaded.loss) == (4, own_loss)
    assert type(loaded.optimizer_) is torch.optim.Adam


def chained(model):
    return lambda: nn.Sequential(model())


@pytest.mark.parametrize(
    ("saved", "name", "value", "message"),
    [
        (layers, "model", Net, r"count is missing in the save, but int64 \(1,\)"),
        (layers, "model", chained(layers), r"0.0.weight is missing in the save"),
        (layers, "model", lambda: layers().double(), r"float32 .* but float64"),
        (layers, "model", lambda: layers()[:1], r"1.bias is .* missing in the model"),
        (layers, "model", lambda: None, "model must return a torch.nn.Module"),
        (layers, "model", lambda: 1 / 0, "model failed: division by zero"),
        (layers, "optimizer", own_optimizer, r"Adam, but this trainer has .*\.OwnSGD;"),
        (
            layers,
            "optimizer",
            own_adam,
            rf"torch.*Adam, but this trainer has {__name__}\.Adam;",
        ),
        (layers, "optimizer", OPTIMIZERS[-1], "0.weight is .*, parameter 0 of group 0"),
        (layers, "optimizer", lambda p: None, "optimizer must return"),
        (layers, "optimizer", lambda p: 1 / 0, "optimizer failed on"),
        (
            layers,
            "scheduler",
            own_scheduler,
            r"StepLR, but this trainer has .*\.LambdaLR;",
        ),
        (Net, "model", Untied, "tied.weight is tied to layers.0.weight in the save"),
        (Net, "model", WithoutBuffer, "hidden is not a buffer of the model"),
        (Net, "model", Refusing, "the model cannot load its state: not now"),
        (Net, "model", lambda: Extra(3, 2), "_extra_state of the model's state is a"),
    ],
)
def test_arguments_that_do_not_match_the_save_are_refused(
    tmp_path, saved, name, value, message
):
    save(fitted(saved, scheduler=stepped), tmp_path, True)

    with pytest.raises((OptionError, SaveError), match=message):
        load(tmp_path, {name: value}, ["tests"])


def test_a_class_of_a_script_may_move_into_a_module(tmp_path, monkeypatch):
    with monkeypatch.context() as script:
        script.setattr(OwnSGD, "__module__", "__main__")
        saved = fitted(layers, optimizer=own_optimizer)
        save(saved, tmp_path, True)

    check_goes_on(load(tmp_path, {"optimizer": own_optimizer}, ["tests"]), saved)


def put_module(folder, name, monkeypatch):
    """A module that can be imported, and leaves a file when it is."""
    (folder / f"{name}.py").write_text(
        "import pathlib\nimport shutil\nfrom torch import nn\n"
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
            ("model", functools.partial(Net, 6)),
            ("optimizer", own_optimizer),
            ("transform", Compose(doubled, doubled)),
            ("callbacks", [Own(5)]),
        ],
    )
    def test_untrusted_code_is_requested(self, tmp_path, name, value):
        saved = fitted(**{"model": layers, name: value})
        save(saved, tmp_path, True)
        others = {} if name == "model" else {"model": layers}

        with pytest.raises(
            OptionError, match=rf"pass {name} to(.|\n)*trusted=\['tests'"
        ):
            load(tmp_path, others)
        check_goes_on(load(tmp_path, others, [__name__]), saved)

    @pytest.mark.parametrize("trusted", [[], ["booby.more"], ["boo"]])
    def test_only_trusted_modules_are_imported(self, tmp_path, monkeypatch, trusted):
        ran = put_module(tmp_path, "booby", monkeypatch)
        folder = tmp_path / "save"
        save(fitted(lambda: nn.Linear(3, 2)), folder, True)
        change(folder, ("arguments", "model"), {"value": {"import": "booby:Net"}})

        with pytest.raises(OptionError, match=r"pass trusted=\['booby'\]"):
            load(folder, {}, trusted)
        assert not ran.exists()

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
            ("sound:Renamed", "not a class or function of that module"),
            ("sound:number", "not a class or function of that module"),
            ("sound:shutil.os.system", "not a class or function of that module"),
            ("../evil:Net", "cannot be imported by that name"),
            ("a:b:c", "cannot be imported by that name"),
            ("a" * 500 + ":b", "cannot be imported by that name"),
            ("", "cannot be imported by that name"),
        ],
    )
    def test_invalid_names_of_code_are_refused(
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
    def test_trusted_must_be_a_list_of_modules(self, tmp_path, trusted):
        with pytest.raises(OptionError, match="trusted must be a list of module names"):
            Trainer.load(tmp_path, trusted=trusted)


def deep(levels=70):
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


def of_loss(value):
    return ("arguments", "loss"), {"value": value}


EXCHANGE = "fit", "dict", 2, 1, "dict", 0, 1, "dict"
PER_REPLICA = "fit", "dict", 3, 1, "dict"


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ((*PER_REPLICA, 0, 1), {"dict": []}),
        ((*PER_REPLICA, 1, 1, "dict", 2, 1), {"dict": [["step", 3]]}),
        ((*EXCHANGE, 1, 1), {"dict": [["*", {"tuple": [-1.0, 0.5]}]]}),
        ((*EXCHANGE, 0), ["residual", {"tensor": "x"}]),
        (("arguments", "own"), {"value": 1}),
        of_loss({"dict": [[[], 2]]}),
        of_loss({"dtype": "Tensor"}),
        of_loss({"code": "x"}),
        of_loss({"object": {"class": "AdaptiveThreshold", "fields": {"initial": -1}}}),
        of_loss({"object": {"class": f"{__name__}:Thawed", "fields": {}}}),
        of_loss({"loss": {"class": "Linear", "arguments": {"dict": []}}}),
        of_loss({"loss": {"class": "MSELoss", "arguments": {"dict": [["own", 1]]}}}),
        of_loss({"normalization": {"x": {"shift": 1}}}),
        of_loss({"keras": {"class_name": "Lambda", "config": {}}}),
        of_loss(deep()),
        (("model", "dict", 2, 1), {"dict": [["a", "b"]]}),
        (("epochs",), -1),
        (("classes",), [1]),
        (("history", "dict", 1, 1), "patience"),
        (("history", "dict", 1, 1), {"dict": [["mood", "x"]]}),
        (("history", "dict", 3, 1), [["number", "<i8"]]),
        (("history", "dict", 3, 1), [["loss", "|O8"]]),
        (("history", "dict", 5, 1), [["compute", "|O8"]]),
        (("history", "dict", 5, 1), [["compute", "<f8"]]),
        (("history", "dict", 6, 1), {"dict": [["mood", "x"]]}),
        (("history", "dict", 6, 1), {"dict": [["replicas", {"dict": [["a", 1]]}]]}),
        (("history", "dict", 8, 1), [["number", "<i8"]]),
        (("history", "dict", 8, 1), [["ratio", "|O8"]]),
        (("history", "dict", 9, 1), ["0.weight"]),  # of two
        (("history", "dict", 9, 1), [1, 2]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_content_is_an_error_with_the_url(tmp_path, steps, wrong):
    save(fitted(scheduler=stepped), tmp_path, True)
    change(tmp_path, steps, wrong)

    with pytest.raises(SaveError, match=f"{tmp_path}"):
        load(tmp_path, {}, ["tests"])


@pytest.mark.parametrize("field", trainer_state._HISTORY)
def test_a_missing_field_of_the_history_is_an_error_that_names_it(tmp_path, field):
    save(fitted(scheduler=stepped), tmp_path, True)

    def without(content):
        pairs = content["history"]["dict"]
        pairs[:] = [pair for pair in pairs if pair[0] != field]

    tamper(tmp_path, without)

    with pytest.raises(SaveError, match=f"{tmp_path} is damaged: .*'{field}'"):
        load(tmp_path, {}, ["tests"])


def test_tensors_with_similar_names_are_distinguished(tmp_path):
    saved = fitted()
    optimizer = saved.fit_state.optimizer.optimizer
    state = optimizer.state[next(saved.model.parameters())]
    state |= {"a.b": {"c": torch.ones(2)}, "a": {"b.c": torch.zeros(1)}}

    read = states(back(saved, tmp_path).fit_state.optimizer.optimizer)[0]

    assert (read["a.b"]["c"].tolist(), read["a"]["b.c"].tolist()) == ([1, 1], [0])
