"""Two models that several questions are about: one expensive to send, one cheap."""

from torch import nn

WIDTH = 2048


def mlp() -> nn.Module:
    """784-2048-2048-10: 5.8 million parameters, 23.3 MB of gradient."""
    return nn.Sequential(
        nn.Linear(784, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


def cnn() -> nn.Module:
    """Two convolutions on images of 28 by 28: 20 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )
