"""Two workers learn handwritten digits as well as one process does."""

import functools
import logging

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Trainer
from tests.support.clusters import cluster_of
from tests.support.digits import accuracy, images, network

logger = logging.getLogger(__name__)

SEEDS = (0, 1, 2)
BATCH_SIZE = 16

# Epochs and learning rates at which both one process and two workers, which behave like
# one process with batches twice as large, have converged.
WAYS = {
    "SGD": (30, functools.partial(torch.optim.SGD, lr=0.1)),
    "momentum": (15, functools.partial(torch.optim.SGD, lr=0.04, momentum=0.9)),
    "Adam": (15, functools.partial(torch.optim.Adam, lr=4e-3)),
}


@pytest.fixture(scope="module")
def client():
    with cluster_of(2) as client:
        yield client


@pytest.fixture(scope="module")
def digits():
    return images()


def alone(epochs, optimizer, digits, seed):
    """Accuracy of a plain loop, as a task of Dask, so that both cores are used."""
    x_train, x_test, y_train, y_test = digits
    torch.manual_seed(seed)
    module = network()
    steps = optimizer(module.parameters())
    x, y = torch.from_numpy(x_train), torch.from_numpy(y_train)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH_SIZE):
            steps.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            steps.step()
    return accuracy(module, x_test, y_test)


def together(client, epochs, optimizer, digits, seed):
    """Accuracy of two workers with the default options."""
    x_train, x_test, y_train, y_test = digits
    trainer = Trainer(
        network, nn.CrossEntropyLoss(), optimizer, client=client, seed=seed
    )
    history = trainer.fit(x_train, y_train, epochs=epochs, batch_size=BATCH_SIZE)
    assert history.column("replicas") == [2] * epochs
    assert history.column("examples") == [len(x_train)] * epochs
    return accuracy(trainer.model_, x_test, y_test)


@pytest.mark.learning
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", WAYS)
def test_two_workers_are_as_accurate_as_one_process(client, digits, name):
    tasks = [client.submit(alone, *WAYS[name], digits, seed) for seed in SEEDS]
    single = client.gather(tasks)
    shared = [together(client, *WAYS[name], digits, seed) for seed in SEEDS]

    logger.info("%s: one process %s, two workers %s", name, single, shared)
    assert np.mean(single) >= 0.97
    assert np.mean(shared) >= np.mean(single) - 0.01
