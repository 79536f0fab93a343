"""A folder of images as a source: x are their pixels, y the numbers of their classes.

Which class an image belongs to is decided in :mod:`daskdl.data.images.layouts`, once,
from the listing. Images are opened where their rows are used.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.config import check_count
from daskdl.data.batching import Rows
from daskdl.data.images.decoding import EIGHT_BITS, Decoding, pillow_modules
from daskdl.data.images.layouts import (
    EXTENSIONS,
    Labels,
    Layout,
    checked_extensions,
    class_folders,
    in_classes,
)
from daskdl.data.images.tiny_imagenet import is_tiny_imagenet, tiny_imagenet
from daskdl.data.shards.folder import Folder, LooseFiles
from daskdl.data.shards.index import Index
from daskdl.data.shards.sharded_files import ShardedFiles
from daskdl.data.source import FileSource
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError, ShapeError

# Of 64 x 64 pixels in three colours these are 3 MB: much more than a request costs, and
# little beside what a batch needs.
FILES_PER_PART = 64

# Where no size is given, so many are opened at most to learn it: some may be damaged,
# and where all these are, something else is wrong.
_TRIED = 8


def image_folder(
    url: str | os.PathLike[str],
    *,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    scale: float | None = EIGHT_BITS,
    split: str | None = None,
    labels: Labels = None,
    classes: Sequence[str] | None = None,
    extensions: str | Sequence[str] = EXTENSIONS,
    files_per_part: int = FILES_PER_PART,
    seed: int | None = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> "ImageFolder":
    """Take a folder with a folder of images for each class, loose or packed.

    Packed are those that :func:`daskdl.data.file_batches` has written: a part is then a
    shard. TinyImageNet's layout is recognised by its ``wnids.txt``. Hidden files and
    those with other extensions are passed over; how many is logged.

    Args:
        url: The folder that has the class folders, or the shards.
        size: (height, width) in pixels, or one number for both; images are resized
            bilinearly, their aspect ratio is not kept. None: all have one size, that
            of the first that can be read.
        channels: 1 (grey), 3 (red, green, blue) or 4 (and alpha).
        scale: Factor that makes float32 of the values 0 to 255; None: uint8.
        split: Only what is in this folder: "train", "val", "test", ...
        labels: The class of an image by its path relative to ``url``: a function or a
            table. None: the folder it is in. False: no labels.
        classes: Their names in the order of their numbers, as ``source.classes`` of
            the training data; an image of another is refused. None: those that are
            there, sorted; of TinyImageNet those in ``wnids.txt``.
        extensions: Of images, in lower or upper case.
        files_per_part: How many loose images are loaded in one go.
        seed: Of the order of loose images. None: sorted by path, so that most parts
            have images of one class. ``source.paths`` has them as they come.
        storage_options: Of the file system, for fsspec.

    Returns:
        A source of x (rows, channels, height, width) and y, int64.

    Raises:
        DataError: If there are no images or classes, an image is in no class folder or
            a class folder without images, or none of the first 8 can be read and no
            size is given.
        OptionError: If an argument is not as described, or Pillow is missing.
    """
    decoding = Decoding.of(size, channels, scale)
    check_count("files_per_part", files_per_part)
    pillow_modules()
    files = files_at(Store(store_of(url).url, dict(storage_options or {})))
    suffixes = checked_extensions(extensions)
    split = None if split is None else split.strip("/")
    if labels is None and is_tiny_imagenet(files):
        layout = tiny_imagenet(files, split, suffixes)
    else:
        layout = class_folders(files, split, labels, classes, suffixes)
    if classes is not None:
        layout = in_classes(files, layout, classes)
    images = list(layout.images)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(images))
        images = [images[i] for i in order]
    return ImageFolder(files, files.groups(images, files_per_part), layout, decoding)


def files_at(store: Store) -> Folder:
    """The files at a URL: those in the shards, if there is an index of some."""
    index = Index.found(store)
    return LooseFiles(store) if index is None else ShardedFiles(store, index)


class ImageFolder(FileSource):
    """Images, some of them in each part; see :func:`image_folder`.

    Attributes:
        paths: Of the images relative to the folder, in the order of the rows.
        labels: Their classes' numbers, likewise; None without labels.
        classes: Names of the labels 0, 1, ...; None without labels.
        readable: What the classes are called for people, where that is known.
        shape: Of one image: channels, height, width.
    """

    lengths: Sequence[int]
    first: Rows
    labels: np.ndarray | None
    readable: Sequence[str] | None
    shape: tuple[int, ...]

    def __init__(
        self,
        files: Folder,
        groups: Sequence[Sequence[str]],
        layout: Layout,
        decoding: Decoding,
    ) -> None:
        self._files, self._groups, self._decoding = files, groups, decoding
        self.parts = len(groups)
        self.lengths = [len(group) for group in groups]
        self.classes, self.readable = layout.classes, layout.readable
        self.labels = _numbers(layout, self.paths)
        self._model, image = _model(files, self.paths, decoding)
        self.shape = image.shape
        label = None if self.labels is None else self.labels[:1]
        self.first = image[None], label

    @property
    def paths(self) -> list[str]:
        """Of the images, in the order of the rows."""
        return [name for group in self._groups for name in group]

    @override
    def load(self, part: int) -> Rows:
        names = self._groups[part]
        x = np.empty((len(names), *self.shape), self._decoding.dtype)
        for i, content in enumerate(self._files.read_all(names)):
            x[i] = self._image(content, self._files.url_of(names[i]))
        if self.labels is None:
            return x, None
        start = sum(self.lengths[:part])
        return x, self.labels[start : start + len(names)]

    @override
    def name(self, part: int) -> str:
        names = self._groups[part]
        first = self._files.url_of(names[0])
        return first if len(names) == 1 else f"{first} and {len(names) - 1} more"

    def file_urls(self, part: int) -> list[str]:
        """The files that a part is made of."""
        return [self._files.url_of(name) for name in self._groups[part]]

    def load_file(self, part: int, file: int) -> Rows:
        """Load one of them, from 0."""
        name = self._groups[part][file]
        x = self._image(self._files.read(name), self._files.url_of(name))[None]
        if self.labels is None:
            return x, None
        row = sum(self.lengths[:part]) + file
        return x, self.labels[row : row + 1]

    def _image(self, content: bytes, url: str) -> np.ndarray:
        image = self._decoding(content, url)
        if image.shape != self.shape:
            raise ShapeError(
                f"{url} has {_pixels(image.shape)}, but {self._model} has "
                f"{_pixels(self.shape)} (height x width); give size=(height, width)"
            )
        return image


def _model(
    files: Folder, names: Sequence[str], decoding: Decoding
) -> tuple[str, np.ndarray]:
    """An image that all others must be like, and its URL; of a known size just zeros.

    Raises:
        DataError: If none of the first few can be read.
    """
    urls = [files.url_of(name) for name in names[:_TRIED]]
    if decoding.size is not None:
        shape = decoding.channels, *decoding.size
        return urls[0], np.zeros(shape, decoding.dtype)
    errors = []
    for name, url in zip(names, urls, strict=False):
        try:
            return url, decoding(files.read(name), url)
        except DataError as error:
            errors.append(error)
    raise DataError(
        f"the size of the images is not known, as none of the first {len(errors)} can "
        f"be read: {errors[0]}; give size=(height, width) to go on without them"
    ) from errors[0]


def _numbers(layout: Layout, names: Sequence[str]) -> np.ndarray | None:
    """The number of each image's class."""
    if layout.labels is None or layout.classes is None:
        return None
    number = {label: i for i, label in enumerate(layout.classes)}
    label_of = dict(zip(layout.images, layout.labels, strict=True))
    return np.array([number[label_of[name]] for name in names], np.int64)


def _pixels(shape: Sequence[int]) -> str:
    return f"{shape[1]} x {shape[2]}"
