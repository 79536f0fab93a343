"""What a fit leaves and begins with: checkpoints, saves, scores, random numbers."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAUROC

from daskdl import (
    AdaptiveThreshold,
    Callback,
    Checkpoint,
    EarlyStopping,
    GradientSharing,
    LayerMonitor,
    ParameterAveraging,
    Trainer,
)
from tests.support.devices import DEVICE
from tests.support.problems import (
    adam,
    nesterov,
    normalised,
    parameters_of,
    rows,
    trainer,
)
from tests.support.recording import Notes

X, Y = rows(240)
CPU = torch.device("cpu")
PLACES = list(dict.fromkeys([(DEVICE, CPU), (CPU, DEVICE), (DEVICE, DEVICE)]))


def net():
    """Without dropout: what replicas of one process draw is in no order."""
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


def on_cpu():
    with torch.device("cpu"):
        return net()


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


def sharing(replicas=2, **options):
    """In step, so that a run can be repeated."""
    options = {"threshold": AdaptiveThreshold(1e-3), **options}
    return GradientSharing(max_staleness=0, replicas_per_worker=replicas, **options)


CASES = {
    "sharing": {"master": sharing()},
    "strict": {"master": sharing(apply="strict", exchange_every=3)},
    "one replica": {"master": sharing(1)},
    "fused": {"master": sharing(), "optimizer": fused},
    "fp16": {"master": sharing(), "autocast": torch.float16},
    "averaging": {"master": ParameterAveraging(3, replicas_per_worker=2)},
    "averaging, with an outer optimizer": {
        "master": ParameterAveraging(3, replicas_per_worker=2, outer=nesterov)
    },
}


def fit(device, *, epochs, resume=None, **options):
    options = {"model": net, "optimizer": adam, **options}
    fitted = trainer(False, device=device, **options)
    fitted.fit(X, Y, epochs=epochs, batch_size=12, validation=(X, Y), resume=resume)
    return fitted


@pytest.mark.parametrize(("before", "after"), PLACES, ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_fit_is_resumed_on_another_device(options, before, after, tmp_path):
    whole = fit(before, epochs=3, **options)
    fit(before, epochs=2, callbacks=[Checkpoint(tmp_path)], **options)

    resumed = fit(after, epochs=3, resume=tmp_path, **options)

    half = "autocast" in options
    rel = 0.2 if half else 1e-2
    if before == after:
        rel = 0.0  # no operation of these models adds up in a random order
    losses = whole.history_.column("loss"), resumed.history_.column("loss")
    assert losses[0][:2] == losses[1][:2]
    assert losses[1][2] == pytest.approx(losses[0][2], rel=rel, abs=0)
    scores = [run.history_[-1]["val_loss"] for run in (whole, resumed)]
    assert scores[1] == pytest.approx(scores[0], rel=rel, abs=0)


def test_random_numbers_go_on_from_a_checkpoint(device, tmp_path):
    """Dropout draws from the generator of the device."""
    options = {"model": normalised, "master": sharing(1)}
    whole = fit(device, epochs=3, **options)
    fit(device, epochs=2, callbacks=[Checkpoint(tmp_path)], **options)

    resumed, other = (
        fit(device, epochs=3, resume=tmp_path, **options),
        fit(device, epochs=3, **options, seed=1),
    )

    losses = [run.history_.column("loss") for run in (whole, resumed, other)]
    assert losses[0] == losses[1]
    assert losses[0][2] != losses[2][2]
    for name, value in parameters_of(whole.model_).items():
        np.testing.assert_array_equal(value, parameters_of(resumed.model_)[name])


def test_a_fit_leaves_the_generators_of_the_process_as_they_were(device):
    torch.manual_seed(11)
    torch.rand(5, device=device)
    before = torch.rand(3), torch.rand(3, device=device)
    torch.manual_seed(11)
    torch.rand(5, device=device)

    fit(device, epochs=1, model=normalised, master=sharing())

    assert torch.equal(torch.rand(3), before[0])
    assert torch.equal(torch.rand(3, device=device), before[1])


@pytest.mark.parametrize(
    "options", [CASES["sharing"], CASES["averaging"]], ids=["sharing", "averaging"]
)
def test_a_saved_trainer_goes_on_as_the_one_that_was_saved(device, options, tmp_path):
    fitted = fit(device, epochs=2, optimizer=fused, **options)

    fitted.save(tmp_path)
    load = functools.partial(
        Trainer.load,
        tmp_path,
        client=False,
        trusted=["tests"],
        model=net,
        optimizer=fused,
        loss=nn.CrossEntropyLoss(),
    )
    loaded, elsewhere = load(), load(device="cpu")

    assert torch.device(loaded.device) == device
    torch.testing.assert_close(loaded.predict(X), fitted.predict(X), rtol=0, atol=0)
    losses = [
        run.fit(X, Y, epochs=2, batch_size=12).column("loss")
        for run in (fitted, loaded)
    ]
    assert losses[0] == losses[1]
    history = elsewhere.fit(X, Y, epochs=2, batch_size=12)
    assert history.column("loss") == pytest.approx(losses[0], rel=1e-3)


# ---- scores


def wrong(labels, classes):
    return float((classes != labels).mean())


def test_scores_and_predictions_are_those_of_plain_torch(device):
    fitted = fit(device, epochs=2, master=sharing())
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    with torch.no_grad():
        expected = fitted.model_(x)
        losses = nn.functional.cross_entropy(expected, y, reduction="none").double()
    close = {"rtol": 1e-4, "atol": 1e-4}

    report = fitted.evaluate(X, Y, metrics=["accuracy", "f1", {"own": wrong}])
    with fitted.predictor(replicas=2) as predictor:
        served = predictor(x[:20])

    torch.testing.assert_close(fitted.predict(x), expected, **close)
    torch.testing.assert_close(served, expected[:20], **close)
    torch.testing.assert_close(
        fitted.predict_proba(x), expected.softmax(1), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(fitted.score_examples(x, y), losses, **close)
    assert report["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    right = (expected.argmax(1) == y).double().mean().item()
    assert report["accuracy"] == pytest.approx(right)
    assert report["own"] == pytest.approx(1 - right)


def test_metrics_of_the_validation_are_those_of_an_evaluation(device):
    metrics = ["accuracy", "f1", {"area": MulticlassAUROC(4, thresholds=20).to(DEVICE)}]
    fitted = fit(device, epochs=2, master=sharing(), metrics=metrics)

    report = fitted.evaluate(X, Y)

    last = fitted.history_[-1]
    for name in ("loss", "accuracy", "f1", "area"):
        assert report[name] == pytest.approx(last[f"val_{name}"], rel=1e-4), name


class Rows(Callback):
    """Keeps the rows that it gets."""

    def __init__(self):
        self.rows = []

    def on_epoch_end(self, row):
        self.rows.append(dict(row))


def test_callbacks_and_tables_get_plain_numbers(device, tmp_path):
    notes, ended = Notes(tmp_path), Rows()
    callbacks = [notes, ended, EarlyStopping(patience=5), LayerMonitor(every=4)]

    fitted = fit(
        device, epochs=2, master=sharing(), callbacks=callbacks, telemetry_every=1
    )

    lines = notes.read()  # JSON has no tensors
    assert {line["replica"] for line in lines} == {0, 1}
    assert all(math.isfinite(line["loss"]) for line in lines)
    json.dumps(ended.rows)
    history = fitted.history_
    assert len(ended.rows) == 2
    assert len(history.steps) == len(lines)
    norms = [row["gradient_norm"] for row in history.layers]
    assert norms
    assert all(map(math.isfinite, norms))


@pytest.mark.parametrize("default", dict.fromkeys([DEVICE.type, "meta"]))
def test_the_default_device_of_torch_is_that_of_the_users_tensors(
    device, default, tmp_path
):
    """On the device meta nothing can be computed."""
    torch.set_default_device(default)
    try:
        fitted = fit(device, epochs=2, model=on_cpu, master=sharing(), metrics="f1")
        fitted.save(tmp_path)
        loaded = Trainer.load(
            tmp_path, client=False, model=on_cpu, optimizer=adam, trusted=["tests"]
        )
        with loaded.predictor() as predictor:
            served = predictor(X[:32])
        report = loaded.evaluate(X, Y, metrics=["classification", "accuracy"])
        predicted, losses = loaded.predict(X), loaded.score_examples(X, Y)
    finally:
        torch.set_default_device(None)

    np.testing.assert_allclose(served, predicted[:32], rtol=1e-5, atol=1e-5)
    assert report["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert fitted.history_[-1]["val_f1"] > 0.3
    assert {p.device.type for p in fitted.model_.parameters()} == {"cpu"}
