"""Image files made by Pillow."""

import io

import numpy as np
from PIL import Image

from daskdl.data.storage import Store


def pixels(seed, shape=(4, 6, 3)):
    """Return random pixels: height, width, channels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def encoded(values, kind="PNG", **options):
    """Return the bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


def folder(url, names, shape=(4, 6, 3)):
    """Write a different image to each path; return the folder."""
    store = Store(str(url))
    for seed, name in enumerate(names):
        store.write(name, encoded(pixels(seed, shape)))
    return store
