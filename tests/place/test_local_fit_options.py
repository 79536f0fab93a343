"""Options of a fit that end it early, or leave something out: what is said of them."""

import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from daskdl import (
    EarlyStopping,
    ModelError,
    OptionError,
    Trainer,
)
from tests.support.problems import kept, mlp, normalised, rows, sgd, trainer

X, Y = rows()


class TestDevice:
    @pytest.fixture(autouse=True)
    def no_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
    def test_cuda_that_is_not_there_is_refused_at_once(self, device):
        made = []
        own = trainer(False, device=device, optimizer=lambda p: made.append(p))
        message = (
            f"device='{device}' is not there: torch finds 0 CUDA devices in this "
            "process; take device='auto', which is CUDA where there is one"
        )

        with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
            own.fit(X, Y)
        assert not made

    def test_a_trainer_that_was_made_for_cuda_still_evaluates(self, tmp_path):
        own = trainer(False)
        own.fit(X, Y)
        own.device = "cuda"
        own.save(tmp_path)
        passed = {"model": mlp, "optimizer": sgd}

        loaded = Trainer.load(tmp_path, client=False, **passed)

        assert loaded.evaluate(X, Y)["accuracy"] == own.evaluate(X, Y)["accuracy"]


class TestOneCycle:
    def test_by_epoch_it_says_how_many_steps_are_needed(self):
        def cycle(optimizer):
            return OneCycleLR(optimizer, 0.1, total_steps=3)

        own = trainer(False, scheduler=cycle)
        message = "OneCycleLR has come to its end, total_steps=3, before the fit"

        with pytest.raises(
            OptionError, match=f"{message}.*total_steps=5 or more, one for"
        ):
            own.fit(X, Y, epochs=5)

    @pytest.mark.parametrize("more", [{}, {"scheduler_every": "step"}], ids=str)
    def test_the_number_that_it_says_is_enough(self, more):
        steps = 15 if more else 1
        own = trainer(
            False,
            scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=2 * steps),
            **more,
        )

        assert len(own.fit(X, Y, epochs=2, batch_size=32)) == 2


batches = []  # of inputs, in the order in which they were trained on


def step(model, batch):
    """What a worker that is a thread imports, and so does not copy."""
    x, y = batch
    if model.training and torch.is_grad_enabled():
        batches.append(x.clone())
    return nn.functional.cross_entropy(model(x), y)


class TestDropLast:
    @pytest.fixture(autouse=True)
    def none_yet(self):
        batches.clear()

    def sizes(self, count, master=None, **options):
        """Of the batches that are trained on, of `count` rows; and the history."""
        own = trainer(False, loss=None, step=step, master=master or kept())
        history = own.fit(X[:count], Y[:count], batch_size=32, **options)
        return [len(x) for x in batches], history

    def test_what_fills_no_batch_is_not_trained_on(self):
        sizes, history = self.sizes(100, epochs=2, drop_last=True)

        assert sizes == [32, 32, 32] * 2
        assert history.column("examples") == [96, 96]

    def test_it_is_the_remedy_for_batch_norm_and_one_row(self):
        own = trainer(False, model=normalised)
        message = r"^replica 0 .*one row: Expected more than 1 value.*drop_last=True"

        with pytest.raises(ModelError, match=message):
            own.fit(X[:33], Y[:33])

        assert own.fit(X[:33], Y[:33], drop_last=True).column("examples") == [32]


@pytest.mark.parametrize(
    ("several", "kinds"),
    [
        (lambda p: [torch.optim.SGD(p[:2], 0.1), torch.optim.Adam(p[2:])], "SGD, Adam"),
        (lambda p: (torch.optim.SGD(p, lr=0.1),), "SGD"),
        (
            lambda p: {"a": torch.optim.SGD(p[:1]), "b": torch.optim.SGD(p[1:])},
            "SGD, S",
        ),
    ],
    ids=["list", "tuple", "dict"],
)
def test_several_optimizers_are_refused_by_number(several, kinds):
    message = f"optimizer must return one torch.optim.Optimizer, got several ({kinds}"

    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        trainer(False, optimizer=several).fit(X, Y)
    assert "parameter groups, as in torch.optim.SGD([{'params': a" in str(caught.value)


class TestEarlyStopping:
    def test_by_itself_it_stops_when_the_validation_loss_gets_no_better(self):
        own = trainer(
            False,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            callbacks=[EarlyStopping()],
        )

        history = own.fit(X, Y, epochs=20, validation=(X, Y))

        assert len(history) == 6  # the first is the best, and five are no better
        assert history.stopping.reason == "patience"


def test_labels_that_a_transform_makes_right_are_accepted():
    shifted = (X, Y + 9)
    own = trainer(False, transform=lambda batch: (batch[0], batch[1] - 9))

    history = own.fit(*shifted, validation=shifted)

    assert history.column("examples") == [len(X)]
    assert 0 < history[0]["val_accuracy"] <= 1
