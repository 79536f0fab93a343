"""How do I train on many small images?

This example packs a folder of images into a few files, trains on them, and measures how
often the right class is among the five best guesses.

Run:  python examples/image_folder.py [seed]
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from dask.distributed import Client, LocalCluster
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import daskdl
from daskdl.data import image_folder, pack

IMAGES = 2000


def network():
    """Two convolutions and two dense layers, for grey images of 8 by 8 pixels."""
    return nn.Sequential(
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


def shifted(image, rng):
    """Move the image by one pixel, up, down, left or right."""
    padded = np.pad(image, 1)
    row, column = [(0, 1), (2, 1), (1, 0), (1, 2)][rng.integers(4)]
    return padded[row : row + 8, column : column + 8]


def write(images, labels, folder):
    """Write images as PNG files, with a folder for each class."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def make_folder(root):
    """Write 2,000 digits: train/0 ... train/9, test/0 ... test/9."""
    digits, labels = load_digits(return_X_y=True)
    digits = np.clip(digits.reshape(-1, 8, 8) * 16, 0, 255).astype(np.uint8)
    train, test, y_train, y_test = train_test_split(
        digits, labels, test_size=0.2, stratify=labels, random_state=0
    )
    # After the split, so that no test image has a shifted twin in the training data.
    rng = np.random.default_rng(0)
    more = rng.choice(len(train), IMAGES - len(digits), replace=False)
    moved = [shifted(train[i], rng) for i in more]
    write([*train, *moved], [*y_train, *y_train[more]], root / "train")
    write(test, y_test, root / "test")


class Table(daskdl.Callback):
    """Print a line for each epoch."""

    def on_epoch_end(self, row):
        print(
            f"epoch {row['epoch']:2}  loss {row['loss']:6.4f}"
            f"  test accuracy {row['val_accuracy']:6.4f}",
            flush=True,
        )


def top(outputs, labels, count):
    """Return the share of rows whose label is among the best guesses."""
    best = np.argsort(outputs, axis=1)[:, -count:]
    return (best == labels[:, None]).any(axis=1).mean()


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        images, packed = Path(folder, "images"), Path(folder, "packed")
        make_folder(images)
        urls = pack(images, url=packed, per_file=100, client=client)
        size = sum(Path(url).stat().st_size for url in urls)
        print(f"{IMAGES} images in {len(urls)} files, {size / 1e3:.0f} kB")
        train = image_folder(packed, split="train", channels=1)
        test = image_folder(packed, split="test", channels=1, classes=train.classes)
        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            client=client,
            seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0,
            callbacks=[Table()],
        )
        start = time.perf_counter()
        trainer.fit(train, epochs=10, batch_size=32, validation=test)
        seconds = time.perf_counter() - start
        score = trainer.evaluate(test)
        outputs = trainer.predict(test)

    print(f"{len(train.paths)} images, {len(train.classes)} classes, {seconds:.1f} s")
    print(f"test accuracy {score['accuracy']:.4f}")
    print(f"among the best five guesses {top(outputs, test.labels, 5):.4f}")


if __name__ == "__main__":
    main()
