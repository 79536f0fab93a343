"""Folders of images, loose or in shards: x are pixels, y the numbers of their classes.

Which class an image belongs to follows from the listing, and is decided once. Images
are decoded by Pillow where their rows are used. TinyImageNet is recognised by its
``wnids.txt``:

=================================  ================================================
file                               what it says
=================================  ================================================
``wnids.txt``                      the classes, one in each line, in their order
``words.txt``                      an identifier, a tab and what it means
``train/<id>/images/*.JPEG``       images of a class
``val/val_annotations.txt``        an image's name, a tab, its class, more
``val/images/*.JPEG``              images of all classes
``test/images/*.JPEG``             images without a class
=================================  ================================================
"""

import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from typing_extensions import override

from daskdl.config import check_count
from daskdl.data.batching import Rows
from daskdl.data.files import (
    FILES_PER_PART,
    Group,
    GroupedFiles,
    Loose,
    Shard,
    shards_in,
)
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError, OptionError, ShapeError

logger = logging.getLogger(__name__)

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
EIGHT_BITS = 1 / 255
EXTENSIONS = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff"),
    ".webp",
)
SPLITS = frozenset({"train", "val", "valid", "validation", "test"})

# The class of an image by its path; False: images have no classes.
Labels = Callable[[str], str] | Mapping[str, str] | Literal[False] | None

# A JPEG is decoded at a lower resolution if that has at least so many times the pixels
# wanted in each direction: a photo of 12 megapixels takes a quarter of the time, and
# its values differ by less than half of 1/255 in the mean.
_FINER = 2

# Where no size is given, so many are opened at most to learn it: some may be damaged,
# and where all these are, something else is wrong.
_TRIED = 8

_CLASSES = "wnids.txt"
_WORDS = "words.txt"
_ANNOTATIONS = "val/val_annotations.txt"
_NOT_OURS = (".", "__MACOSX")  # what systems put into folders, and archives of them

# What Pillow raises on damaged files, depending on the format and on what is damaged.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    TypeError,
    LookupError,
    OverflowError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class Decoding:
    """How images become arrays of the shape (channels, height, width).

    An image is turned as its EXIF orientation says, converted, then resized
    bilinearly; its aspect ratio is not kept. Grey images of 16 bits keep the upper
    eight.

    Attributes:
        size: (height, width) in pixels, or a number for both; None: as the image is.
        channels: 1 (grey), 3 (red, green, blue) or 4 (and alpha).
        scale: Factor for values of 0 to 255, which makes them float32; None: uint8.
    """

    size: int | Sequence[int] | None = None
    channels: int = 3
    scale: float | None = EIGHT_BITS

    def __post_init__(self) -> None:
        if self.channels not in tuple(MODES):
            raise OptionError(f"channels must be 1, 3 or 4, got {self.channels!r}")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise OptionError(
                f"scale must be > 0 and finite, or None, got {self.scale!r}"
            )
        pair = self.height_and_width
        if pair is not None and (len(pair) != 2 or not all(map(_is_length, pair))):
            raise OptionError(
                "size must be a number of pixels >= 1, a pair (height, width) or None, "
                f"got {self.size!r}"
            )

    @property
    def height_and_width(self) -> Sequence[int] | None:
        """In pixels; None: as the image is."""
        size: Any = self.size
        return size if size is None or hasattr(size, "__len__") else (size, size)

    @property
    def dtype(self) -> np.dtype:
        """Of the arrays."""
        return np.dtype(np.uint8 if self.scale is None else np.float32)

    def __call__(self, file: BinaryIO) -> np.ndarray:
        """Decode one image."""
        pillow, _ = _pillow_modules()
        try:
            values = self._values(file)
        except (*_UNREADABLE, pillow.DecompressionBombError) as error:
            shown = str(error) or type(error).__name__
            if "cannot identify image file" in shown:
                shown = "it is not an image, or not of a kind that Pillow knows"
            raise DataError(f"cannot read {file.name}: {shown}") from error
        rows = values[None] if self.channels == 1 else values.transpose(2, 0, 1)
        if self.scale is None:
            return np.ascontiguousarray(rows)
        scaled: np.ndarray = np.multiply(rows, np.float32(self.scale), order="C")
        return scaled

    def _values(self, file: BinaryIO) -> np.ndarray:
        pillow, operations = _pillow_modules()
        size = self.height_and_width
        with pillow.open(file) as image:
            if size is not None:  # no effect but on a much larger JPEG
                image.draft(None, (_FINER * max(size),) * 2)
            operations.exif_transpose(image, in_place=True)
            converted = _converted(image, MODES[self.channels], pillow)
        if size is not None:
            height, width = size
            bilinear = pillow.Resampling.BILINEAR
            converted = converted.resize((width, height), bilinear)
        return np.asarray(converted)


def _is_length(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1


def _pillow_modules() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise OptionError(
            "images are decoded with Pillow, which is not installed; "
            "install it with: pip install daskdl[images]"
        ) from error
    return Image, ImageOps


def _converted(image: Any, mode: str, pillow: Any) -> Any:
    """The image with so many channels of eight bits each."""
    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers; give a loader for it")
    if image.mode.startswith("I"):  # Pillow would cut off at 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have more than 16 bits; give a loader for it")
        image = pillow.fromarray((values >> 8).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")  # or its palette would lose it with a warning
    return image.convert(mode)


@dataclass
class Folder:
    """Files by their paths relative to a folder, loose or in shards.

    Attributes:
        store: The folder.
        shards: In it; None: the files are loose.
    """

    store: Store
    shards: Sequence[Shard] | None

    def names(self, folder: str = "") -> list[str]:
        """Relative paths, sorted; only those inside a folder if one is given."""
        inside = f"{folder}/" if folder else ""
        if self.shards is None:
            return self.store.names(f"{inside}**")
        return sorted(name for name in self._shard_of if name.startswith(inside))

    def folders(self, folder: str) -> list[str]:
        """Names of the folders that are directly in a folder."""
        if self.shards is None:
            return Store(self.store.url_of(folder), self.store.options).folders()
        start = len(folder) + 1 if folder else 0
        inner = [name[start:].partition("/") for name in self.names(folder)]
        return sorted({first for first, slash, _ in inner if slash})

    def exists(self, name: str) -> bool:
        if self.shards is None:
            return self.store.exists(name)
        return name in self._shard_of

    def read(self, name: str) -> bytes:
        if self.shards is None:
            return self.store.read(name)
        (content,) = self._alone(name).each(lambda _, file: file.read())
        return content

    def url_of(self, name: str) -> str:
        """The full URL of a file or folder."""
        if name not in self._shard_of:
            return self.store.url_of(name)
        return self._alone(name).urls[0]

    def groups(self, names: Sequence[str], at_most: int) -> list[Group]:
        """Files that are read together: some loose ones, or those of a shard."""
        if self.shards is None:
            urls = [self.store.url_of(name) for name in names]
            starts = range(0, len(urls), at_most)
            options = self.store.options
            return [Loose(urls[i : i + at_most], options) for i in starts]
        wanted = set(names)
        found = (
            Shard(s.store, s.file, [name for name in s.names if name in wanted])
            for s in self.shards
        )
        return [shard for shard in found if shard.names]

    def _alone(self, name: str) -> Shard:
        shard = self._shard_of[name]
        return Shard(shard.store, shard.file, [name])

    @cached_property
    def _shard_of(self) -> dict[str, Shard]:
        return {name: shard for shard in self.shards or () for name in shard.names}


class Classes(NamedTuple):
    """The class of each image by its path, and all classes in their order."""

    of: Mapping[str, str]
    names: Sequence[str]
    readable: Sequence[str] | None = None  # for people; None: the names


def _class_folders(
    files: Folder,
    split: str | None,
    images: Sequence[str],
    labels: Any,
    all_there: bool,
) -> Classes:
    """The class is the folder that an image is in, or what the user's labels say."""
    of = {}
    for name in images:
        folder = PurePosixPath(name).parent
        if isinstance(labels, Mapping):
            if name not in labels:
                where = files.url_of(name)
                raise DataError(f"labels has no class for {where} ({name!r})")
            of[name] = str(labels[name])
        elif labels is not None:
            of[name] = str(labels(name))
        elif str(folder) in {".", split}:
            raise DataError(
                f"{files.url_of(name)} is in no class folder; put it into one, give "
                "labels=function of its path, or labels=False for images without labels"
            )
        else:
            of[name] = folder.name
    if labels is None and all_there:
        used = {PurePosixPath(name).parts[0 if split is None else 1] for name in images}
        there = [n for n in files.folders(split or "") if not n.startswith(_NOT_OURS)]
        empty = [name for name in there if name not in used]
        if empty:
            where = files.url_of(f"{split or ''}/{empty[0]}".lstrip("/"))
            raise DataError(
                f"{where} has no images ({len(empty)} such folders); remove it, or "
                "list the others in classes"
            )
    return Classes(of, sorted(set(of.values())))


def _tiny_imagenet(files: Folder, split: str | None, images: Sequence[str]) -> Classes:
    """The classes of a split of TinyImageNet."""
    names = files.read(_CLASSES).decode().split()
    if split == "val" and files.exists(_ANNOTATIONS):
        known = _table(files, _ANNOTATIONS)
        of = {name: known.get(PurePosixPath(name).name, "") for name in images}
    else:  # without annotations the images were sorted by class
        of = {name: PurePosixPath(name).parts[1] for name in images}
    allowed, used = set(names), set(of.values())
    for name, label in of.items():
        if label not in allowed:
            got = f"the class {label!r}, which is not in" if label else "no class from"
            source = _CLASSES if label else _ANNOTATIONS
            raise DataError(f"{files.url_of(name)} has {got} {files.url_of(source)}")
    missing = [name for name in names if name not in used]
    if split == "train" and missing:
        raise DataError(
            f"{files.url_of(f'train/{missing[0]}')} has no images ({len(missing)} such "
            f"classes); remove it from {files.url_of(_CLASSES)}"
        )
    if not files.exists(_WORDS):
        return Classes(of, names)
    words = _table(files, _WORDS)
    return Classes(of, names, [words.get(name, name) for name in names])


def _table(files: Folder, name: str) -> dict[str, str]:
    """The first two columns of a text file with tabs."""
    lines = files.read(name).decode().splitlines()
    return dict(line.split("\t")[:2] for line in lines if "\t" in line)


def _images_in(files: Folder, folder: str, extensions: Sequence[str]) -> list[str]:
    """Paths of the images; how many other files there are is logged."""
    names = files.names(folder)
    images = [
        name
        for name in names
        if PurePosixPath(name).suffix.lower() in extensions
        and not any(part.startswith(".") for part in name.split("/"))
    ]
    where, others = files.url_of(folder).rstrip("/"), len(names) - len(images)
    if not images:
        shown = f", but {others} other files" if names else ""
        raise DataError(
            f"{where} has no images{shown}; images end in {', '.join(extensions)}"
        )
    if others:
        logger.info(
            "%d of %d files in %s are not images, and ignored",
            others,
            len(names),
            where,
        )
    return images


def _in_order(files: Folder, found: Classes, classes: Sequence[str]) -> Classes:
    """The same classes in the order that the user gave."""
    chosen = [] if isinstance(classes, str) else [str(name) for name in classes]
    if not chosen or len(set(chosen)) < len(chosen):
        raise OptionError(f"classes must be a list of different names, got {classes!r}")
    known = set(chosen)
    for name, label in found.of.items():
        if label not in known:
            raise DataError(
                f"{files.url_of(name)} is of the class {label!r}, which is not in "
                f"classes ({len(chosen)} names, {chosen[0]!r} to {chosen[-1]!r})"
            )
    if found.readable is None:
        return Classes(found.of, chosen)
    words = dict(zip(found.names, found.readable, strict=True))
    return Classes(found.of, chosen, [words.get(name, name) for name in chosen])


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

    Packed are those that :func:`daskdl.data.pack_files` has written: a part is then a
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
        storage_options: For fsspec, such as credentials; the workers use them too.

    Returns:
        A source of x (rows, channels, height, width) and y, int64.

    Raises:
        DataError: If there are no images or classes, an image is in no class folder or
            a class folder without images, or none of the first 8 can be read and no
            size is given.
        OptionError: If an argument is not as described, or Pillow is missing.
    """
    decoding = Decoding(size, channels, scale)
    check_count("files_per_part", files_per_part)
    _pillow_modules()
    given = [extensions] if isinstance(extensions, str) else list(extensions)
    if not given or not all(isinstance(e, str) and e.strip(".") for e in given):
        raise OptionError(
            f'extensions must be some like (".png", ".jpg"), got {extensions!r}'
        )
    suffixes = tuple(f".{extension.lstrip('.').lower()}" for extension in given)
    split = None if split is None else split.strip("/")
    store = store_of(url, storage_options)
    files = Folder(store, shards_in(store))
    tiny = labels is None and files.exists(_CLASSES)
    if tiny and split not in {"train", "val", "test"}:
        raise OptionError(
            f"{files.url_of(_CLASSES)} says that this is TinyImageNet: split must be "
            f'"train", "val" or "test", got {split!r}'
        )
    images = _images_in(files, split or "", suffixes)
    if split is None and labels is None:  # training and test in one set: a mistake
        tops = {PurePosixPath(name).parts[0] for name in images}
        if tops <= SPLITS and all(name.count("/") > 1 for name in images):
            shown = " or ".join(f"split={name!r}" for name in sorted(tops))
            raise OptionError(f"{store.url} has the folders of splits; give {shown}")
    found: Classes | None = None
    if tiny and split != "test":
        found = _tiny_imagenet(files, split, images)
    elif not tiny and labels is not False:
        found = _class_folders(files, split, images, labels, classes is None)
    if classes is not None and found is not None:
        found = _in_order(files, found, classes)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(images))
        images = [images[i] for i in order]
    return ImageFolder(files, images, files_per_part, found, decoding)


class ImageFolder(GroupedFiles):
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
    paths: Sequence[str]
    labels: np.ndarray | None
    readable: Sequence[str] | None
    shape: tuple[int, ...]

    def __init__(
        self,
        files: Folder,
        images: Sequence[str],
        files_per_part: int,
        found: Classes | None,
        decoding: Decoding,
    ) -> None:
        super().__init__(files.groups(images, files_per_part))
        self._decoding = decoding
        self.lengths = [len(group.urls) for group in self.groups]
        self._starts = np.cumsum([0, *self.lengths]).tolist()
        self.paths = images
        if files.shards is not None:  # in their order
            self.paths = [
                n for g in self.groups if isinstance(g, Shard) for n in g.names
            ]
        self.classes = self.readable = self.labels = None
        if found is not None:
            self.classes, self.readable = found.names, found.readable
            number = {label: i for i, label in enumerate(found.names)}
            numbers = [number[found.of[name]] for name in self.paths]
            self.labels = np.array(numbers, np.int64)
        self._model, image = self._first_image()
        self.shape = image.shape
        self.first = image[None], None if self.labels is None else self.labels[:1]

    @override
    def rows(self, part: int, number: int, file: BinaryIO) -> Rows:
        image = self._decoding(file)
        if image.shape != self.shape:
            raise ShapeError(
                f"{file.name} has {_pixels(image.shape)}, but {self._model} has "
                f"{_pixels(self.shape)} (height x width); give size=(height, width)"
            )
        row = self._starts[part] + number
        return image[None], None if self.labels is None else self.labels[row : row + 1]

    def _first_image(self) -> tuple[str, np.ndarray]:
        """An image that all others must be like, and its URL; of a known size zeros."""
        size, errors = self._decoding.height_and_width, []
        if size is not None:
            shape = self._decoding.channels, *size
            return self.groups[0].urls[0], np.zeros(shape, self._decoding.dtype)
        alone = (
            g.some(slice(i, i + 1)) for g in self.groups for i in range(len(g.urls))
        )
        for one in islice(alone, _TRIED):
            try:
                (image,) = one.each(lambda _, file: self._decoding(file))
            except DataError as error:
                errors.append(error)
            else:
                return one.urls[0], image
        raise DataError(
            f"the size of the images is not known, as none of the first {len(errors)} "
            f"can be read: {errors[0]}; give size=(height, width) to go on without them"
        ) from errors[0]


def _pixels(shape: Sequence[int]) -> str:
    return f"{shape[1]} x {shape[2]}"
