"""Fitted trainers made without a fit, and saves with other content."""

import json
from dataclasses import fields

import torch
from torch import nn

from daskdl import History, Trainer
from daskdl.observe.history import RunRecord
from daskdl.observe.tables import BINS, LayerRow, LayerTable, StepRow
from daskdl.observe.timeline import SpanLog, Timeline
from daskdl.training import trainer_state
from daskdl.training.fit_spec import FitState, TrainedOptimizer, starting_model
from daskdl.training.telemetry import EpochReport, EpochTotals
from daskdl.training.trainer_state import (
    TrainerState,
    new_optimizer,
    scheduling_of,
)
from tests.support.manifests import sealed

NAMES = [f.name for f in fields(Trainer) if f.init and f.name != "client"]


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def fitted(model=layers, steps=3, **options):
    """A trainer whose optimizer and scheduler have made a few steps."""
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
    carried = {"steps_made": 7, "sent": {"*": (1e-3, 0.25)}}
    standing = FitState(trained, carried, epochs=2, class_count=2)
    history = History([{"epoch": 0, "loss": float("nan"), "waits": {"end": 0.5}}])
    row = StepRow(epoch=0, step=10, replica=1, loss=0.5, kind="GAPS")
    history.steps.extend([(10, row)])
    history.layers = LayerTable(["0.weight", "0.bias"])
    values = [0.5, -0.25, 0.25, bytes(range(4 * BINS))] * 3
    history.layers.extend([(2, LayerRow(0, 20, 1, 1, *values))])
    history.run = RunRecord(5.0, 2.5, {"epochs": "1"}, {"torch": "2.8"})
    history.run.join(3, "tcp://host:1")
    history.run.leave(3, "lost")
    history.timeline = Timeline(history.run.began)
    log = SpanLog(3)
    log.enter("compute")
    history.timeline.extend(log.take())
    return TrainerState(arguments, module, standing, history, ["no", "yes"])


def load(url, passed, trusted=()):
    """What `Trainer.load` reads, before it is made a trainer."""
    return trainer_state.load(str(url), NAMES, passed, trusted)


def tamper(folder, change):
    """Change the content of a saved trainer, and seal its manifest again."""
    path = folder / "trainer.json"
    index = json.loads(path.read_text())
    change(index["content"])
    path.write_bytes(sealed(index))
