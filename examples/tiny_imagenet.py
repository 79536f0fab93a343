"""How do I train on TinyImageNet, from packed files?

Unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip first. The first run packs its
images into a few files, in a folder beside it.

Run:  python examples/tiny_imagenet.py FOLDER [--epochs 10] [--workers 2]
"""

import argparse
import itertools
from pathlib import Path

import torch
from dask.distributed import Client, LocalCluster
from torch import nn

import daskdl
from daskdl.data import image_folder, pack


def block(inputs, outputs):
    """A convolution, and half the height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def network(classes):
    widths = 3, 32, 64, 128, 256
    blocks = [block(a, b) for a, b in itertools.pairwise(widths)]
    mean = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*blocks, mean, nn.Flatten(), nn.Linear(256, classes))


class Mirrored(nn.Module):
    """Mirrors half of the images while the model trains, and none of validation."""

    def forward(self, x):
        if not self.training:
            return x
        half = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
        return torch.where(half, x.flip(3), x)


def main():
    parser = argparse.ArgumentParser(description="Train on TinyImageNet.")
    parser.add_argument("folder", type=Path, help="the folder of wnids.txt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    packed = options.folder.absolute().with_name(f"{options.folder.name}-packed")
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        urls = pack(options.folder, url=packed, per_file=1000, client=client)
        train, val = (
            image_folder(packed, size=64, split=split) for split in ("train", "val")
        )
        classes = len(train.classes)
        print(f"{len(train.paths)} images of {classes} classes in {len(urls)} files")
        trainer = daskdl.Trainer(
            model=lambda: nn.Sequential(Mirrored(), network(classes)),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
            client=client,
        )
        trainer.fit(train, epochs=options.epochs, batch_size=64, validation=val)
    for row in trainer.history_:
        print(
            f"epoch {row['epoch']:2}  loss {row['loss']:6.4f}"
            f"  accuracy {row['val_accuracy']:6.4f}"
        )


if __name__ == "__main__":
    main()
