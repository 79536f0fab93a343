"""How do I train on CIFAR-10, with augmentation?

Unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz from
https://www.cs.toronto.edu/~kriz/cifar.html first. Workers read the files.

Run:  python examples/cifar10.py FOLDER [--epochs 10] [--workers 2]
"""

import argparse

import torch
from dask.distributed import Client, LocalCluster
from torch import nn
from torch.nn import functional

import daskdl
from daskdl.data import cifar10


def block(inputs, outputs):
    """A convolution, and half the height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def network():
    return nn.Sequential(
        block(3, 32), block(32, 64), block(64, 128), nn.Flatten(), nn.Linear(2048, 10)
    )


def augmented(batch):
    """Mirror half of the images, and shift each by up to 4 pixels."""
    x, y = batch
    mirrored = torch.rand(len(x), 1, 1, 1) < 0.5
    x = torch.where(mirrored, x.flip(3), x)
    size = x.shape[-1]
    windows = functional.pad(x, (4, 4, 4, 4)).unfold(2, size, 1).unfold(3, size, 1)
    row, column = torch.randint(9, (2, len(x)))
    return windows[torch.arange(len(x)), :, row, column], y


def main():
    parser = argparse.ArgumentParser(description="Train on CIFAR-10.")
    parser.add_argument("folder", help="the unpacked files")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-verify", action="store_true", help="take any files")
    options = parser.parse_args()
    train, test = (
        cifar10(options.folder, train=own, verify=not options.no_verify)
        for own in (True, False)
    )
    print(f"{len(train.labels)} images to train on, {len(test.labels)} to test with")
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
            client=client,
        )
        # Test images are not augmented, so they are not given as validation here.
        trainer.fit(train, epochs=options.epochs, batch_size=64, transform=augmented)
        scores = trainer.evaluate(test, batch_size=256)
    for row in trainer.history_:
        print(f"epoch {row['epoch']:2}  loss {row['loss']:6.4f}")
    print(f"test accuracy {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main()
