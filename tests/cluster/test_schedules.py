"""Steps and learning rates on a cluster: all replicas agree, newcomers too."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.optim import lr_scheduler

from daskdl import Callback
from tests.support.clusters import Script, enough, nothing
from tests.support.problems import kept, rows, trainer

pytestmark = pytest.mark.slow

X, Y = rows(count=960)


class Noting(torch.optim.SGD):
    """Remembers the rate of its last step; there is one replica in a process."""

    last = None

    def step(self, closure=None):
        Noting.last = self.param_groups[0]["lr"]
        return super().step(closure)


def noting(parameters):
    return Noting(parameters, lr=0.05)


class Rates(Callback):
    """Writes the rate of each step into a file of its replica."""

    def __init__(self, folder):
        self._folder = str(folder)

    def on_step_end(self, step):
        line = json.dumps([step.replica, step.epoch, Noting.last])
        with Path(self._folder, f"{step.replica}.jsonl").open("a") as file:
            file.write(line + "\n")

    def read(self):
        """Of each replica the rates of its steps, by epoch."""
        rates = {}
        for path in Path(self._folder).iterdir():
            for line in path.read_text().splitlines():
                replica, epoch, rate = json.loads(line)
                rates.setdefault(replica, {}).setdefault(epoch, []).append(rate)
        return rates


def falling(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))


def never_better(optimizer):
    """Reduces the rate after every epoch, and has a state of its own to agree on."""
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.99, patience=1, threshold=1.0, eps=0.0
    )


def grow(growing, folder, **options):
    """Train, let a worker come, and three more epochs; the rates of all."""
    script = Script(
        (1, lambda: growing.cluster.scale(2)), (2, nothing), (2, nothing), (2, enough)
    )
    rates = Rates(folder)
    options = {"master": kept(), "callbacks": [rates], **options}
    script.run(trainer(growing, optimizer=noting, **options), X, Y)
    assert sorted(rates.read()) == [0, 1]
    return rates.read(), script.rows


@pytest.mark.slow
class TestNewcomers:
    @pytest.mark.parametrize(
        "options",
        [
            {"scheduler": falling, "scheduler_every": "step"},
            {"scheduler": never_better},
        ],
        ids=["step", "plateau"],
    )
    def test_from_the_first_barrier_on_it_goes_with_the_others(
        self, growing, tmp_path, options
    ):
        rates, history = grow(growing, tmp_path, **options)

        first, *later = sorted(rates[1].keys() & rates[0].keys())
        assert len(later) >= 2
        assert [rates[1][epoch][0] for epoch in later] == [
            rates[0][epoch][0] for epoch in later
        ]
        ends = [row["learning_rate"] for row in history]
        assert all(after < before for before, after in itertools.pairwise(ends[::2]))
        # Not from the start again: what it took over was there already.
        assert max(rates[1][first]) <= ends[0]


def own_step(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


class Steps(Callback):
    """Writes a line for each step into a file of its replica."""

    def __init__(self, folder):
        self._folder = str(folder)

    def on_step_end(self, step):
        with Path(self._folder, str(step.replica)).open("a") as file:
            file.write(f"{step.examples}\n")

    def read(self):
        lines = [path.read_text().split() for path in Path(self._folder).iterdir()]
        return [[int(line) for line in each] for each in lines]


class TestTwo:
    def test_every_option_of_a_step_is_taken_along(self, client, tmp_path):
        steps = Steps(tmp_path)
        own = trainer(
            client,
            loss=None,
            step=own_step,
            accumulate=3,
            autocast=torch.bfloat16,
            clip_grad_norm=1.0,
            callbacks=[steps],
        )

        history = own.fit(X, Y, epochs=3, batch_size=16, validation=(X, Y))

        made = steps.read()
        assert len(made) == 2
        assert {rows for each in made for rows in each} == {48}
        assert sum(len(each) for each in made) == 3 * 960 / 48
        assert history.column("examples") == [960] * 3
        assert history[-1]["val_loss"] < history[0]["val_loss"]
        assert own.evaluate(X, Y).keys() == {"loss"}
