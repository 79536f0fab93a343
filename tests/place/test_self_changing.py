"""Frozen parameters and buffers that the model itself changes."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from daskdl import Checkpoint, GradientSharing, ParameterAveraging
from daskdl.errors import ModelError
from tests.support.problems import check_shows_what_was_validated, rows, trainer

X, Y = rows(600)
HELD = X[480:], Y[480:]
X, Y = X[:480], Y[:480]
MASTERS = {
    "sharing": GradientSharing(exchange_every=1),
    "strict": GradientSharing(apply="strict", max_staleness=0),
    "averaging": ParameterAveraging(),
    "averaging, in 8 bits": ParameterAveraging(compression="dense8"),
}


class Teacher(nn.Module):
    """Trains a student, and predicts with a frozen average of it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(20, 4)
        self.mean = copy.deepcopy(self.student).requires_grad_(False)
        self.backbone = nn.Linear(20, 20).requires_grad_(False)
        self.steps = nn.Parameter(torch.zeros((), dtype=torch.int64), False)

    def forward(self, x):
        x = x + 0.01 * self.backbone(x)
        if not self.training:
            return self.mean(x)
        for mean, student in zip(
            self.mean.parameters(), self.student.parameters(), strict=True
        ):
            mean.data = 0.9 * mean.data + 0.1 * student.data  # no version is counted
        self.steps += 1
        return self.student(x)


def of(kind, replicas, **options):
    master = dataclasses.replace(MASTERS[kind], replicas_per_worker=replicas)
    return trainer(False, master=master, **{"model": Teacher, **options})


def check_followed(fitted):
    """Check that the mean follows the student."""
    module = fitted.model_
    apart = (module.mean.weight - module.student.weight).abs().mean()
    assert apart < 0.1 * module.student.weight.abs().mean()


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", MASTERS)
def test_a_frozen_mean_is_returned_as_validated(kind, replicas):
    fitted = of(kind, replicas)

    fitted.fit(X, Y, epochs=6, batch_size=8, validation=HELD)

    check_shows_what_was_validated(fitted, HELD)
    check_followed(fitted)
    assert fitted.history_[-1]["val_accuracy"] > 0.8
    most = 6 * 480 // 8
    assert most / replicas - 1 <= fitted.model_.steps <= most


@pytest.mark.parametrize("kind", ["sharing", "averaging"])
def test_a_frozen_mean_is_resumed_from_a_checkpoint(kind, tmp_path):
    of(kind, 2, callbacks=[Checkpoint(tmp_path)]).fit(X, Y, epochs=2, batch_size=8)
    fitted = of(kind, 2)

    fitted.fit(X, Y, epochs=3, batch_size=8, validation=HELD, resume=tmp_path)

    check_shows_what_was_validated(fitted, HELD)
    check_followed(fitted)


class Remembering(nn.Module):
    """Buffers that change; one is not in the state dict."""

    def __init__(self, grows=False):
        super().__init__()
        self.inner, self.grows = nn.Linear(20, 4), grows
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen += x[:, :4].detach().mean(0)
            if self.grows:
                self.last = x[:3, 0].clone()
        return self.inner(x)


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_that_are_not_in_the_state_dict_are_kept(kind, replicas):
    fitted = of(kind, replicas, model=Remembering)

    fitted.fit(X, Y, epochs=2, batch_size=8)

    assert fitted.model_.seen.abs().min() > 0


@pytest.mark.parametrize("kind", MASTERS)
def test_a_buffer_that_changes_its_shape_is_refused_by_name(kind):
    failing = of(kind, 2, model=lambda: Remembering(grows=True))

    with pytest.raises(
        ModelError, match=r"last of the model was .* \(1,\) before .* is .* \(3,\) now"
    ):
        failing.fit(X, Y, epochs=2, batch_size=8)


class Lazy(nn.Module):
    """A model that adds and removes buffers in the forward pass."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(20, 4), how
        if how in ("a place", "hidden place"):
            self.register_buffer("mask", None, persistent=how == "a place")
        self.register_buffer("once", torch.zeros(2))

    def forward(self, x):
        if self.how.endswith("place") and self.mask is None:
            self.mask = torch.ones(20, device=x.device)
        elif not hasattr(self, "mask"):
            self.register_buffer(
                "mask", torch.ones(20, device=x.device), self.how == "nothing"
            )
        self.once = None
        return self.inner(x * self.mask)


@pytest.mark.parametrize("how", ["a place", "hidden place", "nothing", "hidden"])
@pytest.mark.parametrize("kind", ["sharing", "averaging"])
def test_buffers_registered_in_the_forward_pass_are_returned(kind, how):
    fitted = of(kind, 1, model=lambda: Lazy(how))

    for _ in range(2):
        fitted.fit(X, Y, epochs=1, batch_size=8, validation=HELD)

        check_shows_what_was_validated(fitted, HELD)
        assert fitted.model_.mask.tolist() == [1.0] * 20
        assert ("mask" in fitted.model_.state_dict()) == (how in ("a place", "nothing"))
        assert fitted.model_.once is None


class Moving(nn.Linear):
    """A layer whose parameters get other memory in each forward pass.

    On CUDA, ``flatten_parameters`` of a recurrent layer does the same.
    """

    moves = False

    def forward(self, x):
        if self.moves:
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()
        return super().forward(x)


IN_STEP = {**MASTERS, "sharing": GradientSharing(max_staleness=0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", IN_STEP)
def test_parameters_that_the_model_moves_are_trained_like_others(kind, dtype):
    master, layer = IN_STEP[kind], Moving(20, 4, dtype=dtype)
    losses, models = [], []
    for layer.moves in (False, True):
        fitted = trainer(
            False,
            master=dataclasses.replace(master, replicas_per_worker=2),
            model=layer,
        )

        history = fitted.fit(X, Y, epochs=2, batch_size=16, validation=HELD)

        losses.append(history.column("loss") + history.column("val_loss"))
        models.append(fitted.model_.state_dict())
    assert losses[0] == losses[1]
    for name, parameter in models[0].items():
        assert torch.equal(parameter, models[1][name]), name
