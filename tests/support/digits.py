"""Handwritten digits, a network that learns them, and checks after a fit."""

import functools

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from daskdl import GradientSharing, KeepResidual, Trainer
from tests.support.recording import ATOL, Recorded, check_barrier, records


def network():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def trainer(client, master, **options):
    optimizer = functools.partial(torch.optim.SGD, lr=0.04, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    options = {"master": master, "client": client, "progress": False, **options}
    return Trainer(network, loss, optimizer, **options)


def images():
    """1,437 images to train on and 360 to test on: x, x_test, y, y_test."""
    x, y = load_digits(return_X_y=True)
    return train_test_split(
        (x / 16).astype(np.float32), y, test_size=0.2, stratify=y, random_state=0
    )


def accuracy(module, x, y):
    module.eval()
    with torch.no_grad():
        guesses = module(torch.from_numpy(x)).argmax(dim=1).numpy()
    return float((guesses == y).mean())


X, X_TEST, Y, Y_TEST = images()
EPOCHS = 3
BATCH_SIZE = 16
LEARNT = 0.5  # of the test images; chance is 0.1


def recorded(client, routing, folder, **options):
    # Two neighbors at most: with four replicas, updates are forwarded.
    sharing = GradientSharing(residual=KeepResidual(), routing=routing, fan_out=2)
    return trainer(client, Recorded(str(folder), sharing, atol=ATOL), **options)


def fit(trainer):
    return trainer.fit(X, Y, epochs=EPOCHS, batch_size=BATCH_SIZE)


def check(fitted, history, replicas, folder):
    """Check that all replicas trained to the end, agreed and learned."""
    assert history.column("replicas") == [replicas] * EPOCHS
    assert history.column("examples") == [len(X)] * EPOCHS
    assert history.column("repeated_pieces") == [0] * EPOCHS
    for epoch in range(EPOCHS):
        ends = records(folder, epoch)
        assert sorted(ends) == list(range(replicas))
        check_barrier(ends)
    check_learnt(fitted)


def check_learnt(fitted):
    assert accuracy(fitted.model_, X_TEST, Y_TEST) >= LEARNT
