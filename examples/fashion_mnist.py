"""How do I train on Fashion-MNIST, and see which classes are confused?

Fetch the four files from https://github.com/zalandoresearch/fashion-mnist first.

Run:  python examples/fashion_mnist.py FOLDER [--epochs 10] [--workers 2]
"""

import argparse

import torch
from dask.distributed import Client, LocalCluster
from torch import nn

import daskdl
from daskdl.data import fashion_mnist


def network():
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


def main():
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST.")
    parser.add_argument("folder", help="the four files")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-verify", action="store_true", help="take any files")
    options = parser.parse_args()
    train, test = (
        fashion_mnist(options.folder, train=own, verify=not options.no_verify)
        for own in (True, False)
    )
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
        trainer.fit(train, epochs=options.epochs, batch_size=64, validation=test)
        outputs = trainer.predict(test, batch_size=256)
    for row in trainer.history_:
        print(
            f"epoch {row['epoch']:2}  loss {row['loss']:6.4f}"
            f"  test accuracy {row['val_accuracy']:6.4f}"
        )
    guesses = outputs.argmax(axis=1)
    for label, name in enumerate(trainer.classes_):
        own = test.labels == label
        right = (guesses[own] == label).mean()
        print(f"{name:11}  {own.sum():4} images  accuracy {right:6.4f}")


if __name__ == "__main__":
    main()
