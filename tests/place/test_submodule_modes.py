"""Submodules in evaluation mode stay in it; a model that is all in it is trained."""

import dataclasses

import pytest
import torch
from torch import nn

from daskdl import Checkpoint, ParameterAveraging, Trainer
from tests.support.problems import kept, parameters_of, rows, sgd, trainer

X, Y = rows(count=240)
MASTERS = {"sharing": kept(), "averaging": ParameterAveraging(frequency=3)}


def half_frozen():
    """A frozen backbone with statistics and Dropout, under a head that has both."""
    backbone = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    backbone[1].running_mean.fill_(0.3)
    backbone.requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))


class FreezesItself(nn.Sequential):
    """The usual way to keep a part in evaluation mode, whatever a loop does."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


def started(wrap=nn.Sequential):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return wrap(*half_frozen().children())


ARRIVING = {
    "a module": started,
    "a function": lambda: half_frozen,
    "overriding train": lambda: started(FreezesItself).train(),
    "overriding train, all evaluating": lambda: started(FreezesItself).eval(),
}


@pytest.mark.parametrize("arriving", ARRIVING.values(), ids=ARRIVING)
def test_a_fit_equals_a_plain_loop_that_leaves_modes_alone(one_thread, arriving):
    model, fitted = started(), trainer(False, model=arriving())
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    torch.manual_seed(0)
    for start in range(0, len(X), 28):
        x, y = (torch.from_numpy(data[start : start + 28]) for data in (X, Y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    fitted.fit(X, Y, batch_size=28, shuffle=False)

    for name, value in parameters_of(model).items():
        assert (parameters_of(fitted.model_)[name] == value).all(), name
    assert not any(part.training for part in fitted.model_.modules())


def test_a_model_that_is_all_in_evaluation_mode_is_trained():
    fitted = trainer(False, model=started().eval())

    fitted.fit(X, Y)

    norms = fitted.model_[0][1], fitted.model_[1]
    assert [norm.num_batches_tracked for norm in norms] == [8, 8]


def check_frozen(fitted):
    before = parameters_of(started()[0])
    for name, value in parameters_of(fitted.model_[0]).items():
        assert (value == before[name]).all(), name
    assert fitted.model_[1].num_batches_tracked > 0


def between_fits(fitted, tmp_path):
    fitted.evaluate(X, Y)
    fitted.predict(X)
    return fitted


def through_a_save(fitted, tmp_path):
    fitted.save(tmp_path / "save", optimizer=False)
    return Trainer.load(tmp_path / "save", client=False, model=half_frozen)


def through_two_saves(fitted, tmp_path):
    return through_a_save(through_a_save(fitted, tmp_path), tmp_path)


WAYS = {f.__name__: f for f in (between_fits, through_a_save, through_two_saves)}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
def test_a_second_fit_leaves_the_same_submodules_alone(master, way, tmp_path):
    master = dataclasses.replace(master, replicas_per_worker=3)
    fitted = trainer(False, model=started(), master=master)
    fitted.fit(X, Y, validation=(X, Y), batch_size=10)
    check_frozen(fitted)

    again = way(fitted, tmp_path)
    again.fit(X, Y, validation=(X, Y), batch_size=10)

    check_frozen(again)


def test_a_resumed_fit_leaves_the_same_submodules_alone(tmp_path):
    interrupted = trainer(False, model=started(), callbacks=[Checkpoint(tmp_path)])
    interrupted.fit(X, Y)
    fitted = trainer(False, model=started(), callbacks=[Checkpoint(tmp_path)])

    fitted.fit(X, Y, epochs=2, resume=True)

    check_frozen(fitted)


def test_modes_that_are_set_on_the_fitted_model_are_those_of_the_next_fit():
    fitted = trainer(False, model=started())
    fitted.fit(X, Y)

    fitted.model_.train()
    fitted.fit(X, Y)

    assert fitted.model_[0][1].num_batches_tracked == 8
    assert fitted.model_[1].num_batches_tracked == 16


def test_a_step_gets_the_model_in_the_same_modes():
    def step(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss, {str(i): part.training for i, part in enumerate(model)}

    fitted = Trainer(model=started(), optimizer=sgd, step=step, client=False)
    fitted.fit(X, Y)

    assert [fitted.history_[0][str(i)] for i in range(4)] == [0, 1, 1, 1]
