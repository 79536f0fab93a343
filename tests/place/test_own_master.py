"""A training master of a user's own: the one of `docs/extending.md`, among threads."""

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from daskdl import Checkpoint, OptionError, ParameterAveraging
from tests.support.problems import rows, trainer

PATH = Path(__file__).parents[2] / "examples" / "own_master.py"
X, Y = rows(count=480)


def example():
    """The module of the example; its classes are found by pickle."""
    if PATH.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
        sys.modules[PATH.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[PATH.stem]


def gossip(**options):
    return example().Gossip(**options)


class Found:
    """Weights of replicas before they agreed; pickle finds it by name."""

    weights: ClassVar[list] = []


def watched(**options):
    """A master whose replicas write down their weights before they agree."""
    own = example()

    class Watching(own.GossipExchange):
        def sync(self, interval, examples, *, ended):
            if ended:
                Found.weights.append(self.arrays()["0.weight"])
            super().sync(interval, examples, ended=ended)

    @dataclass(frozen=True)
    class Watched(own.Gossip):
        def attach(self, context):
            return Watching(context, self.every)

    return Watched(replicas_per_worker=3, **options)


def spread(weights):
    """The longest way between two replicas."""
    return max(np.linalg.norm(a - b) for a, b in itertools.combinations(weights, 2))


def weights_of(own):
    return torch.cat([p.detach().flatten() for p in own.model_.parameters()])


def model():
    return torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8))


def test_it_trains():
    own = trainer(False, model=model, master=gossip(replicas_per_worker=3))

    history = own.fit(X, Y, epochs=4, batch_size=8, validation=(X, Y))

    assert [row["replicas"] for row in history] == [3] * 4
    assert [row["examples"] for row in history] == [480] * 4
    assert history[-1]["val_loss"] < 0.8 * history[0]["val_loss"]


def test_replicas_stay_closer_than_without_their_peers():
    found = []
    for every in (1, 10**9):
        Found.weights.clear()
        own = trainer(False, model=model, master=watched(every=every))
        own.fit(X, Y, batch_size=8)
        found.append(list(Found.weights))

    close, apart = found
    assert len(close) == len(apart) == 3
    assert spread(close) < spread(apart) / 2


def test_one_replica_is_a_plain_loop():
    losses = []
    for master in (None, gossip()):
        own = trainer(False, **({} if master is None else {"master": master}))
        losses.append(own.fit(X, Y, epochs=2, batch_size=8).column("loss"))

    assert losses[0] == losses[1]


def test_it_goes_on_from_a_checkpoint(tmp_path):
    first = trainer(
        False,
        model=model,
        master=gossip(replicas_per_worker=2),
        callbacks=[Checkpoint(str(tmp_path))],
    )
    first.fit(X, Y, epochs=2, batch_size=8)

    second = trainer(False, model=model, master=gossip(replicas_per_worker=2))
    history = second.fit(X, Y, epochs=3, batch_size=8, resume=str(tmp_path))

    assert [row["epoch"] for row in history] == [0, 1, 2]
    assert not torch.equal(weights_of(first), weights_of(second))


def test_it_is_another_way_of_training_than_that_of_the_library(tmp_path):
    master = ParameterAveraging(replicas_per_worker=2)
    own = trainer(False, master=master, callbacks=[Checkpoint(str(tmp_path))])
    own.fit(X, Y, batch_size=8)

    with pytest.raises(OptionError, match="resume with the same master"):
        trainer(False, master=gossip(replicas_per_worker=2)).fit(
            X, Y, epochs=2, batch_size=8, resume=str(tmp_path)
        )
