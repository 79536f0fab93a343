"""From the bytes of an image file to an array, with Pillow. No files, no labels.

How the files of an image folder say which class each image belongs to.

Paths and small text files only; no image is opened.

The layout of TinyImageNet: 200 classes named by WordNet's identifiers.

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

A folder of images as a source: x are their pixels, y the numbers of their classes.

Which class an image belongs to is decided in :mod:`daskdl.data.images`, once,
from the listing. Images are opened where their rows are used.
"""

import io
import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from typing_extensions import override

from daskdl.config import check_count
from daskdl.data.batching import Rows
from daskdl.data.shards import Folder, Index, LooseFiles, ShardedFiles
from daskdl.data.source import FileSource
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError, OptionError, ShapeError

logger = logging.getLogger(__name__)

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
EIGHT_BITS = 1 / 255

# A JPEG is decoded at a lower resolution if that has at least so many times the pixels
# wanted in each direction: a photo of 12 megapixels takes a quarter of the time, and
# its values differ by less than half of 1/255 in the mean.
_FINER = 2

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
        size: (height, width) in pixels; None: as the image is.
        channels: 1 (grey), 3 (red, green, blue) or 4 (and alpha).
        scale: Factor for values of 0 to 255, which makes them float32; None: uint8.
    """

    size: tuple[int, int] | None = None
    channels: int = 3
    scale: float | None = EIGHT_BITS

    @classmethod
    def of(
        cls, size: int | Sequence[int] | None, channels: int, scale: float | None
    ) -> Self:
        """Check what the user gave; one number is both height and width.

        Raises:
            OptionError: If one of them is not as described above.

        Example:
            >>> Decoding.of(28, 1, None)
            Decoding(size=(28, 28), channels=1, scale=None)
        """
        several = size is None or hasattr(size, "__len__")
        pair: Any = size if several else (size, size)
        if channels not in tuple(MODES):
            raise OptionError(f"channels must be 1, 3 or 4, got {channels!r}")
        if scale is not None and not 0 < scale < math.inf:
            raise OptionError(f"scale must be > 0 and finite, or None, got {scale!r}")
        if pair is None:
            return cls(None, channels, scale)
        if len(pair) != 2 or any(not _is_length(n) for n in pair):
            raise OptionError(
                "size must be a number of pixels >= 1, a pair (height, width) or None, "
                f"got {size!r}"
            )
        return cls((int(pair[0]), int(pair[1])), channels, scale)

    @property
    def dtype(self) -> np.dtype:
        """Of the arrays."""
        return np.dtype(np.uint8 if self.scale is None else np.float32)

    def __call__(self, content: bytes, url: str) -> np.ndarray:
        """Decode one image.

        Args:
            content: Of an image file.
            url: Of the file, for messages.

        Returns:
            Values of the shape (channels, height, width), in `dtype`.

        Raises:
            DataError: If it cannot be decoded.
        """
        pillow, _ = pillow_modules()
        try:
            values = self._values(content)
        except (*_UNREADABLE, pillow.DecompressionBombError) as error:
            raise DataError(f"cannot read {url}: {_reason(error)}") from error
        rows = values[None] if self.channels == 1 else values.transpose(2, 0, 1)
        if self.scale is None:
            return np.ascontiguousarray(rows)
        scaled: np.ndarray = np.multiply(rows, np.float32(self.scale), order="C")
        return scaled

    def _values(self, content: bytes) -> np.ndarray:
        pillow, operations = pillow_modules()
        with pillow.open(io.BytesIO(content)) as image:
            if self.size is not None:  # no effect but on a much larger JPEG
                image.draft(None, (_FINER * max(self.size),) * 2)
            operations.exif_transpose(image, in_place=True)
            converted = _converted(image, MODES[self.channels], pillow)
        if self.size is not None:
            height, width = self.size
            bilinear = pillow.Resampling.BILINEAR
            converted = converted.resize((width, height), bilinear)
        return np.asarray(converted)


def pillow_modules() -> tuple[Any, Any]:
    """Pillow's ``Image`` and ``ImageOps``.

    Raises:
        OptionError: If Pillow is not installed.
    """
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


def _reason(error: Exception) -> str:
    shown = str(error)
    if "cannot identify image file" in shown:
        return "it is not an image, or not of a kind that Pillow knows"
    return shown or type(error).__name__


def _is_length(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1


EXTENSIONS = (
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
SPLITS = frozenset({"train", "val", "valid", "validation", "test"})

_NOT_OURS = (".", "__MACOSX")  # what systems put into folders, and archives of them

# The class of an image by its path; False: images have no classes.
Labels = Callable[[str], str] | Mapping[str, str] | Literal[False] | None


class Layout(NamedTuple):
    """What is known of a folder before an image is opened.

    Attributes:
        images: Their paths, sorted.
        labels: The class of each; None if they have none.
        classes: Of all images, in the order of their numbers; None as above.
        readable: What the classes are called for people; None: the same.
    """

    images: list[str]
    labels: list[str] | None
    classes: list[str] | None
    readable: list[str] | None = None


def class_folders(
    files: Folder,
    split: str | None,
    labels: Labels,
    classes: Sequence[str] | None,
    extensions: Sequence[str],
) -> Layout:
    """Images whose class is the name of the folder they are in.

    Args:
        files: All there are.
        split: Only those in this folder; None: all.
        labels: How to get a class instead: a function of the path, or a table.
        classes: If given, folders without images are passed over.
        extensions: Of images, in lower case with the dot.

    Raises:
        DataError: If there are no images, if one is in no class folder, or if a class
            folder has none.
        OptionError: If there are splits, and none was chosen.
    """
    images = images_in(files, split or "", extensions)
    if split is None:
        _refuse_splits(files, images, labels)
    if labels is False:
        return Layout(images, None, None)
    if labels is None and classes is None:
        _refuse_empty_folders(files, split or "", images)
    if labels is None:
        known = [_parent(files, name, split) for name in images]
    else:
        known = [_looked_up(files, name, labels) for name in images]
    return Layout(images, known, sorted(set(known)))


def images_in(files: Folder, folder: str, extensions: Sequence[str]) -> list[str]:
    """Paths of the images; how many other files there are is logged.

    Raises:
        DataError: If there are none.
    """
    names = files.names(folder)
    images = [name for name in names if _is_image(name, extensions)]
    where = files.url_of(folder).rstrip("/")
    if not images:
        others = f", but {len(names)} other files" if names else ""
        raise DataError(
            f"{where} has no images{others}; images end in {', '.join(extensions)}"
        )
    if len(images) < len(names):
        logger.info(
            "%d of %d files in %s are not images, and ignored",
            len(names) - len(images),
            len(names),
            where,
        )
    return images


def in_classes(files: Folder, layout: Layout, classes: Sequence[str]) -> Layout:
    """The same images, with the classes and the order that the user gave.

    Raises:
        DataError: If an image is of none of them.
        OptionError: If they are not different names.
    """
    chosen = [] if isinstance(classes, str) else [str(name) for name in classes]
    if not chosen or len(set(chosen)) < len(chosen):
        raise OptionError(f"classes must be a list of different names, got {classes!r}")
    if layout.labels is None:
        return layout
    known = set(chosen)
    for name, label in zip(layout.images, layout.labels, strict=True):
        if label not in known:
            raise DataError(
                f"{files.url_of(name)} is of the class {label!r}, which is not in "
                f"classes ({len(chosen)} names, {chosen[0]!r} to {chosen[-1]!r})"
            )
    return layout._replace(classes=chosen, readable=_reordered(layout, chosen))


def _reordered(layout: Layout, chosen: Sequence[str]) -> list[str] | None:
    if layout.readable is None or layout.classes is None:
        return None
    words = dict(zip(layout.classes, layout.readable, strict=True))
    return [words.get(name, name) for name in chosen]


def checked_extensions(extensions: str | Sequence[str]) -> tuple[str, ...]:
    """Extensions in lower case with the dot.

    Raises:
        OptionError: If there are none.

    Example:
        >>> checked_extensions(["PNG", ".jpg"])
        ('.png', '.jpg')
    """
    given = [extensions] if isinstance(extensions, str) else list(extensions)
    if not given or not all(isinstance(e, str) and e.strip(".") for e in given):
        raise OptionError(
            f'extensions must be some like (".png", ".jpg"), got {extensions!r}'
        )
    return tuple(f".{extension.lstrip('.').lower()}" for extension in given)


def _is_image(name: str, extensions: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in extensions and not hidden


def _refuse_splits(files: Folder, images: Sequence[str], labels: Labels) -> None:
    """Images of training and test in one set would be a mistake."""
    if labels is not None:
        return
    tops = {PurePosixPath(name).parts[0] for name in images}
    deep = all(len(PurePosixPath(name).parts) > 2 for name in images)
    if deep and tops <= SPLITS:
        shown = " or ".join(f"split={name!r}" for name in sorted(tops))
        raise OptionError(f"{files.url_of('')} has the folders of splits; give {shown}")


def _refuse_empty_folders(files: Folder, folder: str, images: Sequence[str]) -> None:
    depth = 1 if folder else 0
    used = {PurePosixPath(name).parts[depth] for name in images}
    empty = [
        name
        for name in files.folders(folder)
        if name not in used and not name.startswith(_NOT_OURS)
    ]
    if empty:
        where = files.url_of(f"{folder}/{empty[0]}".lstrip("/"))
        raise DataError(
            f"{where} has no images ({len(empty)} such folders); remove it, or list "
            "the others in classes"
        )


def _parent(files: Folder, name: str, split: str | None) -> str:
    folder = PurePosixPath(name).parent
    if str(folder) in {".", split}:
        raise DataError(
            f"{files.url_of(name)} is in no class folder; put it into one, give "
            "labels=function of its path, or labels=False for images without labels"
        )
    return folder.name


def _looked_up(
    files: Folder, name: str, labels: Callable[[str], str] | Mapping[str, str]
) -> str:
    if not isinstance(labels, Mapping):
        return str(labels(name))
    if name not in labels:
        raise DataError(f"labels has no class for {files.url_of(name)} ({name!r})")
    return str(labels[name])


CLASSES = "wnids.txt"
WORDS = "words.txt"
ANNOTATIONS = "val/val_annotations.txt"


def is_tiny_imagenet(files: Folder) -> bool:
    """Whether a folder has this layout: it lists its classes in a file."""
    return files.exists(CLASSES)


def tiny_imagenet(
    files: Folder, split: str | None, extensions: Sequence[str]
) -> Layout:
    """The images of a split.

    Args:
        files: All there are.
        split: "train", "val" or "test"; those of the test have no labels.
        extensions: Of images, in lower case with the dot.

    Raises:
        DataError: If there are no images, or the class of one is not known.
        OptionError: If the split is another.
    """
    if split not in {"train", "val", "test"}:
        raise OptionError(
            f"{files.url_of(CLASSES)} says that this is TinyImageNet: split must be "
            f'"train", "val" or "test", got {split!r}'
        )
    images = images_in(files, split, extensions)
    if split == "test":
        return Layout(images, None, None)
    classes = files.read(CLASSES).decode().split()
    class_of = _annotated(files) if split == "val" else _class_folder
    labels = [class_of(name) for name in images]
    _check_labels(files, dict(zip(images, labels, strict=True)), classes)
    if split == "train":
        _check_classes(files, set(labels), classes)
    return Layout(images, labels, classes, _readable(files, classes))


def _class_folder(name: str) -> str:
    return PurePosixPath(name).parts[1]


def _annotated(files: Folder) -> Callable[[str], str]:
    """The class by the annotations; without them the images were sorted by class."""
    if not files.exists(ANNOTATIONS):
        return _class_folder
    lines = files.read(ANNOTATIONS).decode().splitlines()
    known = dict(line.split("\t")[:2] for line in lines if "\t" in line)
    return lambda name: known.get(PurePosixPath(name).name, "")


def _check_labels(
    files: Folder, labels: Mapping[str, str], classes: Sequence[str]
) -> None:
    known = set(classes)
    for name, label in labels.items():
        if label not in known:
            got = f"the class {label!r}, which is not in" if label else "no class from"
            source = CLASSES if label else ANNOTATIONS
            raise DataError(f"{files.url_of(name)} has {got} {files.url_of(source)}")


def _check_classes(files: Folder, used: set[str], classes: Sequence[str]) -> None:
    missing = [name for name in classes if name not in used]
    if missing:
        raise DataError(
            f"{files.url_of(f'train/{missing[0]}')} has no images ({len(missing)} such "
            f"classes); remove it from {files.url_of(CLASSES)}"
        )


def _readable(files: Folder, classes: Sequence[str]) -> list[str] | None:
    if not files.exists(WORDS):
        return None
    lines = files.read(WORDS).decode().splitlines()
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return [words.get(name, name) for name in classes]


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
    files = files_at(store_of(url, storage_options))
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
