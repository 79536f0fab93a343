"""Handwritten digits, and a small network that learns them."""

import functools

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from daskdl import Trainer


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
    """A trainer of the network, whose progress nobody has to see."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.04, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    options = {"master": master, "client": client, "progress": False, **options}
    return Trainer(network, loss, optimizer, **options)


def images():
    """1,437 images to train on and 360 to test on, alike in their classes.

    Returns:
        Arrays (x to train on, x to test on, y to train on, y to test on).
    """
    x, y = load_digits(return_X_y=True)
    return train_test_split(
        (x / 16).astype(np.float32), y, test_size=0.2, stratify=y, random_state=0
    )


def accuracy(module, x, y):
    module.eval()
    with torch.no_grad():
        guesses = module(torch.from_numpy(x)).argmax(dim=1).numpy()
    return float((guesses == y).mean())
