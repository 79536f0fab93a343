"""How do I train a network on two workers, and what do they send each other?

This example trains a small convolutional network on handwritten digits.

Run:  python examples/digits.py [seed]
"""

import sys
import time

import torch
from dask.distributed import Client, LocalCluster
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import daskdl


def network():
    """Two convolutions and two dense layers, for images of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Table(daskdl.Callback):
    """Print a line for each epoch."""

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            print("epoch    loss  accuracy   density       sent   dense would be")
        print(
            f"{row['epoch']:5}  {row['loss']:6.4f}  {row['val_accuracy']:8.4f}"
            f"  {row['density']:8.5f}  {row['sent_bytes'] / 1e3:6.1f} kB"
            f"  {row['dense_bytes'] / 1e6:11.2f} MB",
            flush=True,
        )


def main():
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    X_train, X_test, y_train, y_test = train_test_split(
        X, y, test_size=0.2, stratify=y, random_state=0
    )
    with (
        LocalCluster(n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            client=client,
            seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0,
            callbacks=[Table()],
        )
        start = time.perf_counter()
        history = trainer.fit(
            X_train, y_train, epochs=15, batch_size=32, validation=(X_test, y_test)
        )
        seconds = time.perf_counter() - start
        score = trainer.evaluate(X_test, y_test)

    sent, dense = sum(history.column("sent_bytes")), sum(history.column("dense_bytes"))
    print(f"{len(X_train)} digits, {history[-1]['replicas']} replicas, {seconds:.1f} s")
    print(
        f"sent {sent / 1e6:.2f} MB; dense updates would have been {dense / 1e6:.1f} MB"
    )
    print(f"test accuracy {score['accuracy']:.4f}")


if __name__ == "__main__":
    main()
