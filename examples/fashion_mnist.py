"""How do I train on Fashion-MNIST, and see which classes are confused?

Download the four files from https://github.com/zalandoresearch/fashion-mnist first.
They fit into memory, so they are read into numpy arrays.

Run:  python examples/fashion_mnist.py FOLDER [--epochs 10] [--workers 2]
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from dask.distributed import Client, LocalCluster
from torch import nn

import daskdl

CLASSES = [
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt"),
    *("Sneaker", "Bag", "Ankle boot"),
]


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


def images_and_labels(folder, split):
    """Read the pixels (rows, 1, 28, 28), uint8, and the labels (rows,), int64."""
    with gzip.open(folder / f"{split}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16)
    with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return pixels.reshape(-1, 1, 28, 28), labels.astype(np.int64)


def scaled(batch):
    """Convert the pixels to float32 on the workers: bytes are smaller to send."""
    images, labels = batch
    return images / 255, labels


def main():
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST.")
    parser.add_argument("folder", type=Path, help="the four files")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    X, y = images_and_labels(options.folder, "train")
    X_test, y_test = images_and_labels(options.folder, "t10k")
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
            client=client,
            transform=scaled,
        )
        trainer.fit(
            X, y, epochs=options.epochs, batch_size=64, validation=(X_test, y_test)
        )
        outputs = trainer.predict(X_test, batch_size=256)
    for row in trainer.history_:
        print(
            f"epoch {row['epoch']:2}  loss {row['loss']:6.4f}"
            f"  test accuracy {row['val_accuracy']:6.4f}"
        )
    guesses = outputs.argmax(axis=1)
    for label, name in enumerate(CLASSES):
        of_class = y_test == label
        accuracy = (guesses[of_class] == label).mean()
        print(f"{name:11}  {of_class.sum():4} images  accuracy {accuracy:6.4f}")


if __name__ == "__main__":
    main()
