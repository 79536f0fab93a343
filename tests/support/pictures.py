"""Images that Pillow makes, as files."""

import io

import numpy as np
from PIL import Image

from daskdl.data.storage import Store


def pixels(seed, shape=(4, 6, 3)):
    """Random values of this shape: height, width, channels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def encoded(values, kind="PNG", **options):
    """Bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


def folder(url, names, shape=(4, 6, 3)):
    """A folder with an image of its own at each path."""
    store = Store(str(url))
    for seed, name in enumerate(names):
        store.write(name, encoded(pixels(seed, shape)))
    return store
