"""Small files in the formats of public data sets; the class sets the brightness."""

import gzip
import struct

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image

from tests.support.pictures import encoded

CIFAR10_CLASSES = [
    *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse"),
    *("ship", "truck"),
]


def images(seed, rows, shape, classes=10):
    """Random uint8 pixels, brighter for higher classes; and the classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % classes
    noise = rng.integers(0, 16, (rows, *shape))
    level = labels * (240 // classes)
    return (noise + level.reshape(-1, *[1] * len(shape))).astype(np.uint8), labels


def write_cifar10(folder, rows=20):
    """Write both splits as the Hugging Face Hub has them: Parquet files of PNG."""
    classes = ClassLabel(names=CIFAR10_CLASSES)
    for seed, (split, count) in enumerate({"train": 5 * rows, "test": rows}.items()):
        pixels, labels = images(seed, count, (32, 32, 3))
        columns = {"img": list(pixels), "label": labels.tolist()}
        features = Features({"img": Image(), "label": classes})
        Dataset.from_dict(columns, features).to_parquet(folder / f"{split}.parquet")


def write_fashion_mnist(folder, train=60, test=20):
    """Write the four packed IDX files."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, rows) in enumerate({"train": train, "t10k": test}.items()):
        pixels, labels = images(seed, rows, (28, 28))
        header = struct.pack(">HBBIII", 0, 8, 3, rows, 28, 28)
        contents = {
            "images-idx3": header + pixels.tobytes(),
            "labels-idx1": struct.pack(">HBBI", 0, 8, 1, rows)
            + labels.astype(np.uint8).tobytes(),
        }
        for kind, content in contents.items():
            path = folder / f"{split}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content))


def write_tiny_imagenet(folder, classes=4, train=6, test=3):
    """Write JPEG files in the layout of TinyImageNet, `train` for each class."""
    ids = [f"n{10 - i:08}" for i in range(classes)]  # not sorted
    files = {"wnids.txt": "\n".join(ids).encode()}
    pixels, labels = images(0, classes * train, (64, 64, 3), classes)
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        name = f"train/{ids[label]}/images/{ids[label]}_{number}.JPEG"
        files[name] = encoded(image, "JPEG")
    pixels, labels = images(1, classes * test, (64, 64, 3), classes)
    lines = []
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        lines.append(f"val_{number}.JPEG\t{ids[label]}\t0\t0\t63\t63\n")
        files[f"val/images/val_{number}.JPEG"] = encoded(image, "JPEG")
        files[f"test/images/test_{number}.JPEG"] = encoded(image, "JPEG")
    files["val/val_annotations.txt"] = "".join(lines).encode()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return ids
