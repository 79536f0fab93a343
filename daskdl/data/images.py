"""Folders of images, loose or packed: x holds pixels, y class numbers.

Listing the folder determines the class of each image. Pillow decodes images in the
process that uses their rows. A ``wnids.txt`` identifies TinyImageNet:

=================================  ================================================
file                               contents
=================================  ================================================
``wnids.txt``                      the classes in order, one per line
``train/<id>/images/*.JPEG``       images of a class
``val/val_annotations.txt``        tab-separated: name of an image, its class, ...
``val/images/*.JPEG``              images of all classes
``test/images/*.JPEG``             images without a class
=================================  ================================================
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from typing_extensions import override

from daskdl.config import check_count, is_integral
from daskdl.data.batching import Rows
from daskdl.data.files import (
    FILES_PER_PART,
    Group,
    GroupedFiles,
    grouped_files,
)
from daskdl.data.formats import reading
from daskdl.data.packed import PackedRows, packed_in
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

# The class of an image by its path; False: no classes.
Labels = Callable[[str], str] | Mapping[str, str] | Literal[False] | None

# A JPEG is decoded at a reduced resolution that has at least this many times the
# requested pixels in each direction: a photo of 12 megapixels takes a quarter of the
# time, and its values differ by less than half of 1/255 on average.
_FINER = 2

# Without a size, at most this many images are opened to find it: some may be damaged.
_TRIED = 8

_CLASSES = "wnids.txt"
_ANNOTATIONS = "val/val_annotations.txt"
_SYSTEM_FOLDERS = (".", "__MACOSX")  # prefixes; of operating systems


@dataclass(frozen=True)
class Decoding:
    """How images become arrays of the shape (channels, height, width).

    An image is rotated according to its EXIF orientation, converted, then resized
    bilinearly; the aspect ratio is not kept. Grey images of 16 bits keep the upper
    eight. For the attributes see `image_folder`.
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
        sizes = [] if pair is None else [n for n in pair if is_integral(n) and n >= 1]
        if pair is not None and not len(pair) == len(sizes) == 2:
            raise OptionError(
                "size must be a number of pixels >= 1, a pair (height, width) or None, "
                f"got {self.size!r}"
            )

    @property
    def height_and_width(self) -> Sequence[int] | None:
        """Height and width in pixels; None: the image's own."""
        size: Any = self.size
        if size is None:
            return None
        pair = size if hasattr(size, "__len__") else (size, size)
        # Small integers of numpy would overflow in arithmetic.
        return tuple(int(n) if is_integral(n) else n for n in pair)

    @property
    def dtype(self) -> np.dtype:
        """Of the arrays."""
        return np.dtype(np.uint8 if self.scale is None else np.float32)

    def __call__(self, file: BinaryIO) -> np.ndarray:
        """Decode one image."""
        pillow, operations = _pillow_modules()
        size = self.height_and_width
        decoding_errors = reading(
            file.name, TypeError, OverflowError, pillow.DecompressionBombError
        )
        with decoding_errors, pillow.open(file) as image:
            if size is not None:  # affects only a much larger JPEG
                image.draft(None, (_FINER * max(size),) * 2)
            operations.exif_transpose(image, in_place=True)
            image = _converted(image, MODES[self.channels], pillow)
            if size is not None:
                image = image.resize(size[::-1], pillow.Resampling.BILINEAR)
            values = np.asarray(image)
        rows = values[None] if self.channels == 1 else values.transpose(2, 0, 1)
        if self.scale is None:
            return np.ascontiguousarray(rows)
        scaled: np.ndarray = np.multiply(rows, np.float32(self.scale), order="C")
        return scaled


def _pillow_modules() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise OptionError(
            "images are decoded with Pillow, which is not installed; "
            "install it with: pip install 'daskdl[images]'"
        ) from error
    return Image, ImageOps


def _converted(image: Any, mode: str, pillow: Any) -> Any:
    """Return the image in a mode of Pillow with eight bits per channel."""
    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers; give a loader for it")
    if image.mode.startswith("I"):  # Pillow would clip at 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have more than 16 bits; give a loader for it")
        image = pillow.fromarray((values >> 8).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise Pillow drops it with a warning
    return image.convert(mode)


class Folder:
    """Files by their paths relative to a folder, loose or packed."""

    def __init__(self, store: Store) -> None:
        self.store, packed = store, packed_in(store)
        if isinstance(packed, PackedRows):
            raise DataError(
                f"{store.url} has packed rows, not image files; give the URL to fit"
            )
        self.packed = packed
        self._places = {
            name: (files, number)
            for files in packed or ()
            for number, name in enumerate(files.names)
        }

    def names(self, folder: str) -> list[str]:
        """Relative paths of the files in a folder, sorted."""
        inside = f"{folder}/" if folder else ""
        if self.packed is None:
            return self.store.names(f"{inside}**")
        return sorted(name for name in self._places if name.startswith(inside))

    def folders(self, folder: str) -> list[str]:
        """Names of the direct subfolders of a folder."""
        if self.packed is None:
            return Store(self.store.url_of(folder), self.store.options).folders()
        start = len(folder) + 1 if folder else 0
        inner = [name[start:].partition("/") for name in self.names(folder)]
        return sorted({top for top, slash, _ in inner if slash})

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        if self.packed is None:
            return self.store.exists(name)
        return name in self._places

    def read(self, name: str) -> str:
        """The text of a file."""
        if self.packed is None:
            return self.store.read(name).decode()
        files, number = self._places[name]
        return files.opener()(number).read().decode()

    def url_of(self, name: str) -> str:
        """The full URL of a file or folder."""
        if name not in self._places:
            return self.store.url_of(name)
        files, number = self._places[name]
        return files.url(number)

    def file_groups(
        self, names: Sequence[str], at_most: int
    ) -> tuple[Sequence[Group], Sequence[str]]:
        """Files that are read together, and the names in their order."""
        if self.packed is None:
            urls = [self.store.url_of(name) for name in names]
            return grouped_files(urls, at_most, self.store.options), names
        wanted = set(names)
        chosen = [[n for n in files.names if n in wanted] for files in self.packed]
        groups = [
            replace(files, names=inside)
            for files, inside in zip(self.packed, chosen, strict=True)
            if inside
        ]
        return groups, [name for group in groups for name in group.names]


class Classes(NamedTuple):
    """The class of each image by path, and all classes in order."""

    of: Mapping[str, str]
    names: Sequence[str]


def _class_folders(
    files: Folder,
    split: str | None,
    images: Sequence[str],
    labels: Any,
    check_empty: bool,
) -> Classes:
    """The class of an image is its outermost folder, or follows from `labels`."""
    of = {}
    depth = 0 if split is None else len(PurePosixPath(split).parts)
    for name in images:
        path = PurePosixPath(name)
        if isinstance(labels, Mapping):
            if name not in labels:
                where = files.url_of(name)
                raise DataError(f"labels has no class for {where} ({name!r})")
            of[name] = str(labels[name])
        elif labels is not None:
            of[name] = str(labels(name))
        elif len(path.parts) == depth + 1:
            raise DataError(
                f"{files.url_of(name)} is in no class folder; put it into one, give "
                "labels=function of its path, or labels=False for images without labels"
            )
        else:
            of[name] = path.parts[depth]
    if labels is None and check_empty:
        used = set(of.values())
        folders = [
            n for n in files.folders(split or "") if not n.startswith(_SYSTEM_FOLDERS)
        ]
        empty = [name for name in folders if name not in used]
        if empty:
            where = files.url_of(f"{split or ''}/{empty[0]}".lstrip("/"))
            raise DataError(
                f"{where} has no images ({len(empty)} such folders); remove it, or "
                "list the others in classes"
            )
    return Classes(of, sorted(set(of.values())))


def _tiny_imagenet(files: Folder, split: str | None, images: Sequence[str]) -> Classes:
    """Return the classes of a split of TinyImageNet."""
    names = files.read(_CLASSES).split()
    if split == "val" and files.exists(_ANNOTATIONS):
        lines = files.read(_ANNOTATIONS).splitlines()
        known = dict(line.split("\t")[:2] for line in lines if "\t" in line)
        of = {name: known.get(PurePosixPath(name).name, "") for name in images}
    else:  # without annotations, images are sorted into folders by class
        of = {name: PurePosixPath(name).parts[1] for name in images}
    for name, label in of.items():
        if label not in names:
            got = f"the class {label!r}, which is not in" if label else "no class from"
            source = _CLASSES if label else _ANNOTATIONS
            raise DataError(f"{files.url_of(name)} has {got} {files.url_of(source)}")
    missing = sorted(set(names) - set(of.values()))
    if split == "train" and missing:
        raise DataError(
            f"{files.url_of(f'train/{missing[0]}')} has no images ({len(missing)} such "
            f"classes); remove it from {files.url_of(_CLASSES)}"
        )
    return Classes(of, names)


def _images_in(files: Folder, folder: str, extensions: Sequence[str]) -> list[str]:
    """Return the paths of the images, and log the number of other files."""
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
            "%d of %d files in %s are not images and are ignored",
            others,
            len(names),
            where,
        )
    return images


def _in_order_of(names: Sequence[str], classes: Classes, files: Folder) -> Classes:
    """Return the same classes in the user's order."""
    ordered = [] if isinstance(names, str) else [str(name) for name in names]
    known = set(ordered)
    if not ordered or len(known) < len(ordered):
        raise OptionError(f"classes must be a list of different names, got {names!r}")
    for path, label in classes.of.items():
        if label not in known:
            raise DataError(
                f"{files.url_of(path)} is of the class {label!r}, which is not in "
                f"classes ({len(ordered)} names, {ordered[0]!r} to {ordered[-1]!r})"
            )
    return Classes(classes.of, ordered)


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
    """Read images from a folder with a subfolder for each class, loose or packed.

    If :func:`daskdl.data.pack` wrote the folder, a part is a packed file. A
    ``wnids.txt`` identifies the layout of TinyImageNet. Hidden files and files with
    other extensions are ignored; their number is logged.

    Args:
        url: The folder that contains the class folders, or the packed files.
        size: (height, width) in pixels, or one number for both. Images are resized
            bilinearly; the aspect ratio is not preserved. None: all images must have
            the size of the first readable one.
        channels: 1 (grey), 3 (red, green, blue) or 4 (and alpha).
        scale: Factor for values from 0 to 255, which become float32; None: uint8.
        split: Subfolder whose images are read: "train", "val", "test", ...
        labels: A function, or a mapping, from the path of an image relative to ``url``
            to its class. None: the outermost folder below ``url``, or below `split`.
            False: no labels.
        classes: Names of the classes in the order of the class numbers, as in
            ``source.classes`` of the training data; an image of any other class is an
            error. None: the names of the classes, sorted; for TinyImageNet, those in
            ``wnids.txt``.
        extensions: File extensions of images, in lower or upper case.
        files_per_part: Number of loose images in a part.
        seed: Seed of the order of loose images, which ``source.paths`` follows. None:
            sorted by path, so that most parts have images of a single class.
        storage_options: Options for fsspec, such as credentials; also used on the
            workers.

    Returns:
        A source of x, shape (rows, channels, height, width), and y, int64.

    Raises:
        DataError: If there are no images or classes, an image is in no class folder, a
            class folder has no images, or no size is given and none of the first 8
            images can be read.
        OptionError: If an argument is invalid, or Pillow is not installed.
    """
    decoding = Decoding(size, channels, scale)
    check_count("files_per_part", files_per_part)
    _pillow_modules()
    listed = [extensions] if isinstance(extensions, str) else list(extensions)
    if not listed or not all(isinstance(e, str) and e.strip(".") for e in listed):
        raise OptionError(
            'extensions must be file extensions, such as (".png", ".jpg"), '
            f"got {extensions!r}"
        )
    suffixes = tuple(f".{extension.lstrip('.').lower()}" for extension in listed)
    split = None if split is None else split.strip("/")
    store = store_of(url, storage_options)
    files = Folder(store)
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
    labeled: Classes | None = None
    if tiny and split != "test":
        labeled = _tiny_imagenet(files, split, images)
    elif not tiny and labels is not False:
        labeled = _class_folders(files, split, images, labels, classes is None)
    if classes is not None and labeled is not None:
        labeled = _in_order_of(classes, labeled, files)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(images))
        images = [images[i] for i in order]
    return ImageFolder(files, images, files_per_part, labeled, decoding)


class ImageFolder(GroupedFiles):
    """Images, some of them in each part; see :func:`image_folder`.

    Attributes:
        paths: Paths of the images relative to the folder, in the order of the rows.
        labels: Class numbers of the images in this order, int64; None without labels.
        classes: Names of the labels 0, 1, ...; None without labels.
        shape: Channels, height and width of an image.
    """

    lengths: Sequence[int]
    first_rows: Rows
    paths: Sequence[str]
    labels: np.ndarray | None
    shape: tuple[int, ...]

    one_example = True

    def __init__(
        self,
        files: Folder,
        images: Sequence[str],
        files_per_part: int,
        classes: Classes | None,
        decoding: Decoding,
    ) -> None:
        groups, self.paths = files.file_groups(images, files_per_part)
        super().__init__(groups)
        self._decoding = decoding
        self.lengths = [len(group.names) for group in self.groups]
        self._starts = np.cumsum([0, *self.lengths]).tolist()
        self.classes = self.labels = None
        if classes is not None:
            self.classes = classes.names
            number = {label: i for i, label in enumerate(classes.names)}
            numbers = [number[classes.of[path]] for path in self.paths]
            self.labels = np.array(numbers, np.int64)
        self._shape_from, image = self._first_image()
        self.shape = image.shape
        self.first_rows = image[None], None if self.labels is None else self.labels[:1]

    @override
    def rows(self, part: int, number: int, file: BinaryIO) -> Rows:
        image = self._decoding(file)
        if image.shape != self.shape:
            _, height, width = image.shape
            raise ShapeError(
                f"{file.name} has {height} x {width}, but {self._shape_from} has "
                f"{self.shape[1]} x {self.shape[2]} (height x width); give "
                "size=(height, width)"
            )
        row = self._starts[part] + number
        return image[None], None if self.labels is None else self.labels[row : row + 1]

    def _first_image(self) -> tuple[str, np.ndarray]:
        """Return the URL and pixels of an image with the shape of all images.

        If the size is known, no image is read and the pixels are zeros.
        """
        size = self._decoding.height_and_width
        errors: list[DataError] = []
        if size is not None:
            shape = self._decoding.channels, *size
            return self.groups[0].url(0), np.zeros(shape, self._decoding.dtype)
        for group in self.groups:
            open_file = group.opener()
            for number in range(len(group.names))[: _TRIED - len(errors)]:
                try:
                    with open_file(number) as file:
                        return group.url(number), self._decoding(file)
                except DataError as error:
                    errors.append(error)
        raise DataError(
            f"the size of the images is not known, as none of the first {len(errors)} "
            f"can be read: {errors[0]}; pass size=(height, width) to set the size"
        ) from errors[0]
