"""Functions that make models for the rows of `problems`, which cannot be pickled."""

import threading

from torch import nn
from torch.nn.utils import parametrizations

from tests.support.problems import mlp, normalised


def locked():
    model = mlp()
    model.lock = threading.Lock()
    return model


def of_a_local_class():
    lock = threading.Lock()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            with lock:
                return self.layers(x)

    return Own()


def hooked():
    model, lock, seen = mlp(), threading.Lock(), []

    def hook(module, inputs, output):
        with lock:
            seen.append(len(output))

    model[0].register_forward_hook(hook)
    return model


def with_a_generator():
    model = normalised()
    model.names = (f"step {i}" for i in range(9))
    return model


def parametrized():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(20, 16)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(16, 4)),
    )
    model.lock = threading.Lock()
    return model


def recurrent():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.lock = nn.LSTM(5, 8, batch_first=True), threading.Lock()
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            return self.last(self.lstm(x.reshape(-1, 4, 5))[0][:, -1])

    return Own()


MODELS = [locked, of_a_local_class, hooked, with_a_generator, parametrized, recurrent]
