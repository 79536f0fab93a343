"""Small files in the formats of public data sets; the brightness tells the class."""

import gzip
import struct
from pathlib import Path

import numpy as np

from tests.support.pictures import encoded


def images(seed, rows, shape, classes=10):
    """Random uint8 pixels, brighter for higher classes; and the classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % classes
    noise = rng.integers(0, 16, (rows, *shape))
    level = labels * (240 // classes)
    return (noise + level.reshape(-1, *[1] * len(shape))).astype(np.uint8), labels


def python2_pickle(pixels, labels):
    """A batch of CIFAR-10 as Python 2 and numpy 1 wrote it, with byte strings."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    rows, columns = pixels.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + (b"(K\x01" + number(rows) + number(columns) + b"\x86")
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        + (number(-1) * 2 + b"K\x00tb\x89")
        + (b"T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb")
    )
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    label = text(b"batch_label") + text(b"training batch")
    items = label + text(b"labels") + listed + text(b"data") + array
    return b"\x80\x02}(" + items + b"u."


CIFAR10_NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def write_cifar10(folder, rows=20, binary=True):
    """Write all batches, `rows` in each; return pixels and labels by name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for seed, name in enumerate(CIFAR10_NAMES):
        pixels, labels = written[name] = images(seed, rows, (3, 32, 32))
        flat = pixels.reshape(rows, -1)
        if binary:
            content = np.column_stack([labels.astype(np.uint8), flat]).tobytes()
        else:
            content = python2_pickle(flat, labels)
        Path(folder, f"{name}.bin" if binary else name).write_bytes(content)
    return written


def write_mnist(folder, train=60, test=20, packed=True):
    """Write the four IDX files; return pixels and labels for "train" and "t10k"."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for seed, (name, rows) in enumerate({"train": train, "t10k": test}.items()):
        pixels, labels = written[name] = images(seed, rows, (28, 28))
        header = struct.pack(">HBBIII", 0, 8, 3, rows, 28, 28)
        contents = {
            "images-idx3": header + pixels.tobytes(),
            "labels-idx1": struct.pack(">HBBI", 0, 8, 1, rows)
            + labels.astype(np.uint8).tobytes(),
        }
        for kind, content in contents.items():
            path = folder / f"{name}-{kind}-ubyte"
            if packed:
                path, content = Path(f"{path}.gz"), gzip.compress(content)
            path.write_bytes(content)
    return written


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
