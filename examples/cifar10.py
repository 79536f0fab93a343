"""How do I train on CIFAR-10 from the Hugging Face Hub, with augmentation?

`datasets.load_dataset` downloads the images once. A folder of Parquet files with the
columns `img` and `label` works as well.

Run:  python examples/cifar10.py [--data uoft-cs/cifar10] [--epochs 10] [--workers 2]
"""

import argparse

import torch
from dask.distributed import Client, LocalCluster
from datasets import load_dataset
from torch import nn
from torch.nn import functional

import daskdl


def block(inputs, outputs):
    """A convolution, and half the height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Network(nn.Module):
    """Classifies the column `img`: bytes, with the channels last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(block(3, 32), block(32, 64), block(64, 128)),
            *(nn.Flatten(), nn.Linear(2048, 10)),
        )

    def forward(self, img):
        return self.layers(img.movedim(3, 1) / 255)


def augmented(batch):
    """Mirror half of the images, and shift each by up to 4 pixels."""
    columns, labels = batch
    images = columns["img"]
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    images = torch.where(mirrored, images.flip(2), images)
    size = images.shape[1]
    padded = functional.pad(images, (0, 0, 4, 4, 4, 4))
    windows = padded.unfold(1, size, 1).unfold(2, size, 1)
    row, column = torch.randint(9, (2, len(images)))
    shifted = windows[torch.arange(len(images)), row, column].movedim(1, 3)
    return {"img": shifted}, labels


def main():
    parser = argparse.ArgumentParser(description="Train on CIFAR-10.")
    parser.add_argument("--data", default="uoft-cs/cifar10", help="name, or a folder")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    splits = load_dataset(options.data)
    train, test = splits["train"], splits["test"]
    print(f"{len(train)} images to train on, {len(test)} to test with")
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=Network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
            client=client,
        )
        # `transform` also changes validation data, so the test images come later.
        trainer.fit(
            train,
            label="label",
            epochs=options.epochs,
            batch_size=64,
            transform=augmented,
        )
        scores = trainer.evaluate(test, label="label", batch_size=256)
    for row in trainer.history_:
        print(f"epoch {row['epoch']:2}  loss {row['loss']:6.4f}")
    print(f"test accuracy {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main()
