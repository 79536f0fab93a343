"""Models, precisions, optimizers and data of a user, trained by two replicas."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from daskdl import ParameterAveraging
from daskdl.data import Standardize
from tests.support.devices import DEVICE, needs_cuda
from tests.support.problems import kept, mlp, normalised, rows, sgd, trainer

X, Y = rows()
IDS = np.random.default_rng(0).integers(0, 50, (256, 12))
LARGE = (IDS.mean(1) > 24.5).astype(np.int64)


# Other tests fit the same on the CPU.
on_the_cpu_elsewhere = pytest.mark.slow


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=3e-3, **options)


def learn(device, x=X, y=Y, *, model=mlp, epochs=3, rel=1e-4, **options):
    """Fit, and check that the model learned, and is the one that was validated.

    All replicas agree after each epoch, or the fit fails.
    """
    options = {"master": kept(replicas_per_worker=2), "optimizer": adamw, **options}
    fitted = trainer(False, device=device, model=model, **options)
    held = (x,) if y is None else (x, y)

    history = fitted.fit(
        x,
        y,
        epochs=epochs,
        batch_size=16,
        validation=held if y is not None else x,
    )

    losses = history.column("loss")
    assert history.column("replicas") == [2] * epochs
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.9 * losses[0]
    scored = fitted.evaluate(*held)["loss"]
    assert scored == pytest.approx(history[-1]["val_loss"], rel=rel)
    tensors = [*fitted.model_.parameters(), *fitted.model_.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    return fitted


PRECISIONS = {
    "bf16 autocast": {"autocast": torch.bfloat16},
    "bf16 autocast, accumulated and clipped": {
        "autocast": torch.bfloat16,
        "accumulate": 2,
        "clip_grad_norm": 1.0,
    },
    "fp16 with a scaler": {"autocast": torch.float16},
    "fp16 with a scaler, accumulated and clipped": {
        "autocast": torch.float16,
        "accumulate": 2,
        "clip_grad_norm": 1.0,
    },
    "bf16 parameters": {"model": lambda: mlp().bfloat16(), "rel": 0.05},
    # AdamW's eps is 0 in float16.
    "fp16 parameters": {"model": lambda: mlp().half(), "optimizer": sgd, "rel": 0.05},
    "float64": {"model": lambda: mlp().double()},
    "accumulated": {"accumulate": 3},
    "clipped": {"clip_grad_norm": 0.5},
}
MASTERS = {
    "sharing": kept(replicas_per_worker=2),
    "strict": kept(replicas_per_worker=2, apply="strict"),
    "averaging": ParameterAveraging(replicas_per_worker=2),
}


@pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
def test_precisions(device, options):
    learn(device, **options)


HALF = {name: options for name, options in PRECISIONS.items() if "16" in name}


@on_the_cpu_elsewhere
@pytest.mark.parametrize("master", ["strict", "averaging"])
@pytest.mark.parametrize("options", HALF.values(), ids=HALF)
def test_half_precision_with_other_exchanges(device, options, master):
    learn(device, master=MASTERS[master], **options)


def steep(scores, y):
    return 1000 * functional.cross_entropy(scores, y)


def test_steps_that_overflow_are_skipped_until_the_scale_has_fallen(device):
    """The scale begins at 65536, so the first gradients are infinite in float16."""
    fitted = learn(
        device,
        loss=steep,
        autocast=torch.float16,
        scheduler=lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=100),
        scheduler_every="step",
        master=kept(replicas_per_worker=2, max_staleness=0),
        epochs=4,
    )

    steps = max(int(state["step"]) for state in fitted.optimizer_.state.values())
    assert 20 < steps < 58  # of 60


# ---- models


class Tied(nn.Module):
    """With weights used twice, and frozen ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.last = nn.Linear(20, 4)

    def forward(self, x):
        return self.last(self.frozen(self.second(self.first(x).relu())).relu())


class Recurrent(nn.Module):
    """Its layer gets other memory on CUDA in each forward pass, as its user asks."""

    def __init__(self, kind, *, flattens=False):
        super().__init__()
        self.layer = kind(5, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.last, self.flattens = nn.Linear(32, 4), flattens

    def forward(self, x):
        if self.flattens:
            self.layer.flatten_parameters()
        return self.last(self.layer(x.reshape(-1, 4, 5))[0][:, -1])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 4),
        ).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.reshape(-1, 1, 4, 5).to(memory_format=torch.channels_last)
        return self.layers(x)


class Words(nn.Module):
    """Rows of an embedding, whose gradients may be sparse, and attention."""

    def __init__(self, *, sparse=False, layers=1):
        super().__init__()
        self.words = nn.Embedding(50, 32, sparse=sparse)
        self.places = nn.Parameter(torch.randn(12, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(32, 2)

    def forward(self, ids):
        return self.last(self.layers(self.words(ids) + self.places).mean(1))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.EmbeddingBag(50, 8, sparse=True)
        self.right = nn.EmbeddingBag(50, 8, sparse=True)
        self.last = nn.Linear(16, 2)

    def forward(self, ids):
        parts = self.left(ids[:, :6]), self.right(ids[:, 6:])
        return self.last(torch.cat(parts, 1))


def two_types():
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x.double())

    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), Wide(32, 4).double())


def parametrized():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(20, 32)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(32, 4)),
    )


MODELS = {
    "batch norm and dropout": {"model": normalised},
    "tied and frozen": {"model": Tied},
    "two types": {"model": two_types},
    "parametrized": {"model": parametrized},
    "convolutions, channels last": {"model": Convolutions, "epochs": 5, "rel": 1e-2},
    "transformer": {"x": IDS, "y": LARGE, "model": Words, "epochs": 5},
    "transformer, bf16": {
        "x": IDS,
        "y": LARGE,
        "model": Words,
        "epochs": 5,
        "autocast": torch.bfloat16,
    },
    "sparse rows": {
        "x": IDS,
        "y": LARGE,
        "model": Bag,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "clip_grad_norm": 5.0,
        "epochs": 8,
    },
}
# cuDNN copies the weights in each forward pass, and says so once.
COPIED = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_models(device, options):
    learn(device, **options)


@COPIED
@pytest.mark.parametrize("flattens", [False, True], ids=["", "flattens"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
def test_recurrent_layers(device, kind, flattens):
    learn(device, model=lambda: Recurrent(kind, flattens=flattens), rel=1e-2, epochs=5)


def test_a_model_of_transformers(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=12,
        num_labels=2,
    )
    inputs = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "labels": LARGE}

    fitted = learn(
        device,
        inputs,
        None,
        model=lambda: transformers.BertForSequenceClassification(config),
        loss=None,
        epochs=5,
        autocast=torch.bfloat16,
    )

    del inputs["labels"]
    assert fitted.predict(inputs, output="logits").shape == (256, 2)


# ---- optimizers

OPTIMIZERS = {
    "fused": functools.partial(adamw, fused=True),
    "foreach": functools.partial(adamw, foreach=True),
    "amsgrad": functools.partial(adamw, amsgrad=True),
    "nadam": functools.partial(torch.optim.NAdam, lr=3e-3),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=3e-2),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "fused sgd": functools.partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True
    ),
    "rate as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3)),
    "capturable": pytest.param(
        functools.partial(adamw, capturable=True), marks=needs_cuda
    ),
    "capturable, rate as a tensor": pytest.param(
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3), capturable=True),
        marks=needs_cuda,
    ),
}


@on_the_cpu_elsewhere
@pytest.mark.parametrize("master", ["sharing", "averaging"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_of_optimizers_comes_to_the_client_and_back(
    device, optimizer, master
):
    fitted = learn(device, optimizer=optimizer, master=MASTERS[master])

    state = [t for s in fitted.optimizer_.state.values() for t in s.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} <= {"cpu"}
    history = fitted.fit(X, Y, epochs=1, batch_size=16)
    assert history[-1]["loss"] < 0.9


SCHEDULES = {
    "epoch": {"scheduler": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5)},
    "step": {
        "scheduler": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=45),
        "scheduler_every": "step",
    },
    "plateau": {
        "scheduler": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    },
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(device, schedule):
    fitted = learn(device, **schedule)

    assert fitted.scheduler_ is not None


# ---- data


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, left, right):
        return self.last((self.left(left) + self.right(right)).relu())


def noisy(batch):
    x, y = batch
    return x + torch.randn_like(x) * 0.01, y


def on_device(*arrays):
    return tuple(torch.as_tensor(array).to(DEVICE) for array in arrays)


CLASSES = torch.tensor([1.0, 2.0, 1.0, 0.5])
DATA = {
    "dict of inputs": {
        "x": {"left": X[:, :8], "right": X[:, 8:]},
        "model": Several,
    },
    "tuple of inputs": {"x": (X[:, :8], X[:, 8:]), "model": Several},
    "names of classes": {"y": np.array(["ant", "bee", "cat", "dog"])[Y]},
    "class weights": {"loss": nn.CrossEntropyLoss(weight=CLASSES), "accumulate": 2},
    "ignored labels": {
        "y": np.where(np.arange(len(Y)) % 5, Y, -1),
        "loss": nn.CrossEntropyLoss(ignore_index=-1),
    },
    "one label each": {
        "y": np.eye(4, dtype=np.float32)[Y],
        "loss": nn.BCEWithLogitsLoss(pos_weight=torch.full((4,), 2.0)),
    },
    "transform": {"transform": noisy, "rel": 0.05},
    "standardized": {"transform": Standardize().fit(X, client=False)},
}


@on_the_cpu_elsewhere
@pytest.mark.parametrize("options", DATA.values(), ids=DATA)
def test_data(device, options):
    learn(device, **options)


def test_weights_of_rows(device):
    weight = 1.0 + np.arange(len(Y)) % 3
    fitted = trainer(False, device=device, master=MASTERS["sharing"], optimizer=adamw)

    history = fitted.fit(X, Y, sample_weight=weight, epochs=3, batch_size=16)

    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    scored = fitted.evaluate(X, Y, sample_weight=weight)["loss"]
    assert math.isfinite(scored)


def test_data_and_loss_that_lie_on_the_device(device):
    """As users write it for a plain loop: all of it is on the device already."""
    x, y = on_device(X, Y)
    loss = nn.CrossEntropyLoss(weight=CLASSES.to(DEVICE))

    for data, model in [
        ((x, y), mlp().to(DEVICE)),
        ((TensorDataset(x, y),), lambda: mlp().to(DEVICE)),
    ]:
        fitted = trainer(
            False,
            device=device,
            model=model,
            loss=loss,
            master=MASTERS["sharing"],
            optimizer=adamw,
        )
        history = fitted.fit(*data, epochs=3, batch_size=16, validation=(x, y))

        assert history[-1]["loss"] < 0.9 * history[0]["loss"]
        outputs = fitted.predict(x)
        assert (outputs.shape, outputs.device.type) == ((480, 4), "cpu")
        assert fitted.evaluate(x, y)["accuracy"] > 0.5
        assert {p.device.type for p in fitted.model_.parameters()} == {"cpu"}


def own_step(model, batch):
    x, y = batch
    scores = model(x)
    wrong = (scores.argmax(1) != y).float().mean()
    return functional.cross_entropy(scores, y), {"error": wrong, "rows": len(x)}


def test_a_step_of_the_user_runs_on_the_device(device):
    fitted = learn(device, loss=None, step=own_step, autocast=torch.bfloat16)

    assert fitted.history_[-1]["val_error"] < fitted.history_[0]["error"]
