"""Files of Keras, and networks of Keras as JSON."""

import zipfile
from pathlib import Path

import numpy as np
import torch

from daskdl.keras.module import KerasModule, library

keras = library()


def small():
    """A model of one layer, whose weights are few."""
    return KerasModule(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="last")])
    )


def rewritten(path, target, compression=zipfile.ZIP_STORED, **members):
    """The file with other members; None leaves one out."""
    with (
        zipfile.ZipFile(path) as before,
        zipfile.ZipFile(target, "w", compression) as after,
    ):
        held = {name: before.read(name) for name in before.namelist()}
        for name, content in {**held, **members}.items():
            if content is not None:
                after.writestr(name, content)
    return target


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
