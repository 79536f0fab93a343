"""Fitted trainers made without a fit, and files that are tampered with."""

import copy
import json
import os
import sys
import threading

import torch
from torch import nn

from daskdl import History, Trainer
from daskdl.data.manifest import _digest
from daskdl.history import StepRow
from daskdl.saving.trainer_state import (
    NAMES,
    TrainerState,
    new_optimizer,
    scheduling_of,
)
from daskdl.thresholds import Sent
from daskdl.training.base import CompressionState
from daskdl.training.fit_spec import FitState, TrainedOptimizer, starting_model
from daskdl.training.telemetry import EpochReport, EpochTotals


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def fitted(model=layers, steps=3, **options):
    """A trainer whose model has made a few steps.

    Args:
        steps: That its optimizer and its scheduler have made.
        options: Of the trainer.
    """
    chosen = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        **options,
    }
    if "step" in options:
        del chosen["loss"]
    trainer = Trainer(model=model, **chosen)
    arguments = {name: getattr(trainer, name) for name in NAMES}
    module = starting_model(model, 0)
    optimizer, scheduling = new_optimizer(arguments, module), scheduling_of(arguments)
    trained = TrainedOptimizer.new(optimizer, scheduling, module)
    generator = torch.Generator().manual_seed(1)
    for i in range(steps):
        for p in module.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
        totals = EpochTotals(loss_sum=3.0 - i, examples=1)
        trained.rate.end_epoch([EpochReport(totals=totals, scheduled=i)])
    optimizer.zero_grad(set_to_none=True)
    sent = CompressionState({"*": Sent(1e-3, 0.25)}, 7)
    standing = FitState(trained, sent, 2, 2)
    history = History([{"epoch": 0, "loss": float("nan"), "waits": {"end": 0.5}}])
    history.steps.extend([(10, StepRow(0, 10, 1, 0.5, kind="GAPS"))])
    return TrainerState(arguments, module, standing, history, ["no", "yes"])


def signed(index):
    """An index as an attacker would write it: with a right checksum."""
    index = {name: value for name, value in index.items() if name != "sha256"}
    return json.dumps({**index, "sha256": _digest(index)}).encode()


WRONG = [None, True, -1, 2**70, 1.5, 1e308, "x", "../../x", [], {}, [[]], {"x": []}]


class Watch:
    """What this thread does that loading never does; there is one hook.

    Other threads have their own affairs: those of clusters that other tests began.
    """

    ACTIONS = (
        "os.exec",
        "os.fork",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.system",
        "pickle.find_class",
        "socket.connect",
        "subprocess.Popen",
    )

    def __init__(self):
        self.watching = None
        self.seen = []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if self.watching != threading.get_ident():
            return
        writes = event == "open" and set(str(arguments[1])) & set("wax+")
        if event in self.ACTIONS or writes:
            self.seen.append((event, arguments))


def flipped(content, generator):
    changed = bytearray(content)
    changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def places(value, path=()):
    """Paths to everything in some JSON."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def replaced(index, path, wrong):
    changed = copy.deepcopy(index)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    return changed


class Bomb:
    """Pickled, it is a call that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
