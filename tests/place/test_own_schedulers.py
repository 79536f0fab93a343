"""Schedulers that users write: what they keep may grow, and a fit goes on from it."""

import pytest
import torch
from torch.optim import lr_scheduler

from daskdl import Checkpoint, GradientSharing
from tests.support.problems import rows, trainer

X, Y = rows(120)


class Remembering(lr_scheduler.LRScheduler):
    """Halves the rate each time, and keeps what it has seen."""

    def __init__(self, optimizer):
        self.seen, self.rates, self.last = [], torch.zeros(0), 0
        super().__init__(optimizer)

    def get_lr(self):
        self.seen.append(self.last_epoch)
        rates = [group["lr"] / 2 for group in self.optimizer.param_groups]
        self.rates = torch.cat([self.rates, torch.tensor(rates)])
        self.last = None if self.last_epoch else 0
        return rates


class Halving:
    """A factor with a state of its own, which LambdaLR keeps."""

    def __init__(self):
        self.asked = []

    def __call__(self, epoch):
        self.asked.append(epoch)
        return 0.5 ** len(self.asked)


SCHEDULERS = {
    "a class": Remembering,
    "a callable object": lambda o: lr_scheduler.LambdaLR(o, Halving()),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_fit_goes_on_with_what_a_scheduler_has_gathered(
    scheduler, replicas, tmp_path
):
    def rates(epochs, **options):
        master = GradientSharing(replicas_per_worker=replicas)
        kept = [Checkpoint(tmp_path)]
        own = trainer(False, scheduler=scheduler, master=master, callbacks=kept)
        own.fit(X, Y, epochs=epochs, batch_size=10, **options)
        return own.history_.column("learning_rate")

    begun = rates(2)

    assert rates(4, resume=tmp_path) == [begun[0] / 2**n for n in range(4)]
