"""Small models, data and trainers; models that cannot be pickled; streams."""

import copy
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset, get_worker_info

from daskdl import (
    AdaptiveThreshold,
    GradientSharing,
    KeepResidual,
    ParameterAveraging,
    Trainer,
)
from daskdl.compression.flat import FlatParameters, grid_for
from daskdl.config import Timeouts
from daskdl.training.epoch_control import EvaluationPlan
from daskdl.training.fit_spec import ReplicaSpec

SIZE = 20 * 32 + 32 + 32 * 4 + 4  # parameters of `mlp`


def rows(count=480, features=20, classes=4, seed=0):
    """Noisy classes; no two rows are equal, so every replica has others."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, features))
    y = rng.integers(0, classes, count)
    x = centres[y] + rng.normal(size=(count, features))
    return x.astype(np.float32), y


def mlp():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))


def normalised():
    """With buffers to average, and dropout that needs the random state."""
    return nn.Sequential(
        nn.Linear(20, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, 4),
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=2e-3)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.02)


def nesterov(parameters):
    """An outer optimizer of parameter averaging."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def halved(optimizer):
    """A schedule by epoch: the rate shows how many epochs it has seen."""
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


class Clock:
    """A clock that the test advances."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def trainer(client, **options):
    """A trainer of the small problem, unless an option says otherwise."""
    options = {"model": mlp, "optimizer": sgd, "progress": False, **options}
    options = {"loss": nn.CrossEntropyLoss(), "master": kept(), **options}
    return Trainer(client=client, **options)


def replica_spec(model, **options):
    """The specification of a fit of one epoch, as its replicas get it."""
    flat = FlatParameters(copy.deepcopy(model))
    defaults = {
        "objective": nn.CrossEntropyLoss(),
        "optimizer": sgd,
        "master": GradientSharing(),
        "run": 7,
        "rows": (None, None),
        "evaluation": EvaluationPlan(1),
        "timeouts": Timeouts.from_config(),
    }
    return ReplicaSpec(
        **{**defaults, **options},
        model=model,
        size=flat.size,
        grid=grid_for(flat),
        outbox_bytes=2**20,
        inbox_bytes=2**20,
    )


def kept(**options):
    """Sharing that loses nothing on purpose: no clipping."""
    options = {"threshold": AdaptiveThreshold(initial=1e-3), **options}
    return GradientSharing(**{"residual": KeepResidual(), **options})


MASTERS = pytest.mark.parametrize(
    "master", [kept, ParameterAveraging], ids=["sharing", "averaging"]
)


def start_of(model, seed=0):
    """The module that a trainer with this seed starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model()


def check_shows_what_was_validated(fitted, held):
    """The model that came back has the scores of the last epoch."""
    last, scored = fitted.history_[-1], fitted.evaluate(*held)
    assert scored["loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert scored["accuracy"] == pytest.approx(last["val_accuracy"])


def parameters_of(module):
    state = module.cpu().state_dict()
    return {name: value.numpy().copy() for name, value in state.items()}


def plain_loop(
    model,
    optimizer,
    *,
    seed,
    epochs,
    batch_size,
    x,
    y,
    more=None,
    threads=1,
    device="cpu",
):
    """What a user would write without daskdl, in order.

    Args:
        device: Where the model trains.
        more: Options of a trainer that change the step, by name.
        threads: Of torch. Sums over a batch depend on how they are shared out.
    """
    more = {"accumulate": 1, **(more or {})}
    dtype, norm = more.get("autocast"), more.get("clip_grad_norm")
    size = batch_size * more["accumulate"]
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    module = model().train().to(device)
    kind = torch.device(device).type
    steps = optimizer(module.parameters())
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    scheduler = more["scheduler"](steps) if "scheduler" in more else None
    torch.manual_seed(seed)
    for _ in range(epochs):
        for start in range(0, len(x), size):
            steps.zero_grad(set_to_none=True)
            stop = min(start + size, len(x))
            for i in range(start, stop, batch_size):
                part = slice(i, min(i + batch_size, stop))
                with torch.autocast(kind, dtype, enabled=dtype is not None):
                    output = module(torch.from_numpy(x[part]).to(device))
                    labels = torch.from_numpy(y[part]).to(device)
                    loss = nn.functional.cross_entropy(output, labels)
                loss = loss / ((stop - start) / (part.stop - part.start))
                scaler.scale(loss).backward()
            if norm is not None:
                scaler.unscale_(steps)
                nn.utils.clip_grad_norm_(module.parameters(), norm)
            scaler.step(steps)
            scaler.update()
            if scheduler and more.get("scheduler_every") == "step":
                scheduler.step()
        if scheduler and more.get("scheduler_every") != "step":
            scheduler.step()
    torch.set_num_threads(former)
    return parameters_of(module)


def locked():
    model = mlp()
    model.lock = threading.Lock()
    return model


def of_a_local_class():
    lock = threading.Lock()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            with lock:
                return self.layers(x)

    return Own()


def hooked():
    model, lock, seen = mlp(), threading.Lock(), []

    def hook(module, inputs, output):
        with lock:
            seen.append(len(output))

    model[0].register_forward_hook(hook)
    return model


def with_a_generator():
    model = normalised()
    model.names = (f"step {i}" for i in range(9))
    return model


def parametrized():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(20, 16)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(16, 4)),
    )
    model.lock = threading.Lock()
    return model


def recurrent():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.lock = nn.LSTM(5, 8, batch_first=True), threading.Lock()
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            return self.last(self.lstm(x.reshape(-1, 4, 5))[0][:, -1])

    return Own()


MODELS = [locked, of_a_local_class, hooked, with_a_generator, parametrized, recurrent]


class Stream(IterableDataset):
    """Gives all rows to whoever goes through it, in an order of the pass's own."""

    def __init__(self, count, shuffled=False):
        self.count = count
        self.shuffled = shuffled

    def __iter__(self):
        x, y = rows(self.count)
        order = torch.randperm(self.count) if self.shuffled else range(self.count)
        return ((x[i], int(y[i])) for i in order)


class ShardedStream(Stream):
    """Gives each worker rows of its own."""

    def __iter__(self):
        info = get_worker_info()
        for i, row in enumerate(super().__iter__()):
            if i % info.num_workers == info.id:
                yield row


def shown(value):
    """As `repr`, and the same in each process that collects the tests."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
