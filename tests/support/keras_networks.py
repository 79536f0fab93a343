"""Networks of Keras as JSON, and what they are trained on."""

from pathlib import Path

import numpy as np
import torch

MODELS = Path(__file__).parents[1] / "keras_models"


def pictures(count=64):
    """Pictures of the size of CIFAR-10's, brighter from class to class."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, count)
    x = rng.normal(size=(count, 32, 32, 3)) / 10 + y[:, None, None, None] / 5 - 1
    return x.astype(np.float32), y


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=2e-3)
