"""Public data sets in the files in which they are published.

CIFAR-10, MNIST and Fashion-MNIST are a few files with many images; a part is a range of
one of them, and workers read the files. TinyImageNet is a folder of images. The ratings
of MovieLens are arrays. Nothing is downloaded, and nothing in a file is executed.
"""

import gzip
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from dask.utils import SerializableLock
from typing_extensions import override

from daskdl.config import check_choice, check_flag
from daskdl.data.batching import Rows
from daskdl.data.formats import optional_module, reading
from daskdl.data.images import EIGHT_BITS, Decoding, Folder, ImageFolder, image_folder
from daskdl.data.source import Source
from daskdl.data.storage import AnyPath, Store, joined, store_of
from daskdl.errors import DataError

# Images and labels, or one of them, from the name and the content of a file.
Decode = Callable[[str, bytes], Sequence[np.ndarray]]

PART_ROWS = 1000  # 12 MB of CIFAR-10
HELD = 2  # decoded files in memory, 31 MB each of CIFAR-10, 47 MB of MNIST

_AS_IT_IS = "fetch it again, or give verify=False to use it as it is"


class ImageFiles(Source):
    """Files of many images and their labels, decoded a file at a time.

    Attributes:
        classes: Names of the labels 0, 1, ...
        labels: All labels, int64, in the order of the rows.
    """

    lengths: Sequence[int]

    def __init__(
        self,
        store: Store,
        files: Sequence[Sequence[str]],
        decode: Decode,
        classes: Sequence[str],
        scale: float | None,
        published: Mapping[str, str | int],
    ) -> None:
        Decoding(scale=scale)  # checks it
        self._store, self._files, self._decode = store, files, decode
        self._scale, self._lock = scale, SerializableLock()
        self._held: dict[int, Rows] = {}
        self.classes = classes
        self._ranges: list[tuple[int, int, int]] = []
        labels = []
        for number in range(len(files)):
            images, own = self._read(number, published)
            alike = 0 < len(own) == len(images)
            if not alike or own.min() < 0 or own.max() >= len(classes):
                raise DataError(
                    f"{self._url(number)} has {len(images)} images and {len(own)} "
                    f"labels; each image must have one in [0, {len(classes)})"
                )
            starts = range(0, len(own), PART_ROWS)
            self._ranges += [(number, a, min(a + PART_ROWS, len(own))) for a in starts]
            labels.append(own)
        self.labels = np.concatenate(labels)
        self.parts = len(self._ranges)
        self.lengths = [stop - start for _, start, stop in self._ranges]
        self.first = self._scaled(images[:1]), own[:1]

    @override
    def load(self, part: int) -> Rows:
        number, start, stop = self._ranges[part]
        with self._lock:
            if number not in self._held:
                for former in [*self._held][: 1 - HELD]:
                    del self._held[former]
                self._held[number] = self._read(number, {})
            images, labels = self._held[number]
        return self._scaled(images[start:stop]), labels[start:stop]

    @override
    def name(self, part: int) -> str:
        number, start, stop = self._ranges[part]
        return f"rows {start} to {stop - 1} of {self._url(number)}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": {}}

    def _url(self, number: int) -> str:
        return self._store.url_of(self._files[number][0])

    def _read(self, number: int, published: Mapping[str, str | int]) -> Rows:
        arrays: list[np.ndarray] = []
        for name in self._files[number]:
            content, url = self._store.read(name), self._store.url_of(name)
            _verify(url, content, published.get(name))
            with reading(url, pickle.UnpicklingError, TypeError, AttributeError):
                arrays += self._decode(name, content)
        images, labels = arrays
        return images, labels.astype(np.int64)

    def _scaled(self, images: np.ndarray) -> np.ndarray:
        if self._scale is None:
            return images.copy()
        scaled: np.ndarray = np.multiply(images, np.float32(self._scale))
        return scaled


def _verify(url: str, content: bytes, published: str | int | None) -> None:
    """Compare a file with its published MD5 checksum, or its size in bytes."""
    if published is None:
        return
    what, found = "a size of", f"{len(content)} bytes"
    expected = f"{published} bytes"
    if isinstance(published, str):
        what, expected = "the MD5 checksum", published
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{url} has {what} {found}, and the published file {expected}; {_AS_IT_IS}"
        )


def _found(
    folder: AnyPath,
    inner: Sequence[str],
    choices: Sequence[Sequence[str]],
    home: str,
    options: Mapping[str, Any] | None,
) -> tuple[Store, Sequence[str]]:
    """The first folder, and the first names, of which all files are there."""
    given = store_of(folder, options)
    missing: list[list[str]] = []
    for name in ("", *inner):
        store = Store(joined(given.url, name) if name else given.url, given.options)
        for names in choices:
            absent = [one for one in names if not store.exists(one)]
            if not absent:
                return store, names
            missing.append([store.url_of(one) for one in absent])
    first = min(missing, key=len)
    some = len(first) < len(choices[0])  # the others of the same kind are there
    others = "" if some else "".join(f", nor {names[0]}" for names in choices[1:])
    raise DataError(
        f"there is no {first[0]}{others}; the folder must have the unpacked files of "
        f"{home}"
    )


# ---- CIFAR-10

CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse"),
    *("ship", "truck"),
)
_CIFAR10_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR10_ROW = 3 * 32 * 32
_CIFAR10_FILES = {
    True: [f"data_batch_{number}" for number in range(1, 6)],
    False: ["test_batch"],
}
# MD5 checksums as in torchvision; sizes are 10,000 rows of 3,073 bytes.
_CIFAR10_PUBLISHED: Mapping[str, str | int] = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    **{
        f"{name}.bin": 10_000 * (1 + _CIFAR10_ROW)
        for names in _CIFAR10_FILES.values()
        for name in names
    },
}


def cifar10(
    folder: AnyPath,
    *,
    train: bool = True,
    scale: float | None = EIGHT_BITS,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> ImageFiles:
    """Take CIFAR-10: 60,000 colour images of 32 x 32 pixels, in 10 classes.

    The files are those of ``cifar-10-binary.tar.gz`` or ``cifar-10-python.tar.gz`` from
    https://www.cs.toronto.edu/~kriz/cifar.html, unpacked: ``data_batch_1.bin`` to
    ``data_batch_5.bin`` and ``test_batch.bin``, or the same without ``.bin``. The
    latter are pickles, of which only dicts, lists, numbers, text and numpy arrays are
    read; nothing in them is executed.

    Args:
        folder: A path or URL that workers reach too: the folder of the files, or the
            one that it is in.
        train: The 50,000 images for training; False: the 10,000 for tests.
        scale: Factor for values of 0 to 255, which makes them float32; None: uint8.
        verify: Compare each file, once, with its published checksum, or with its
            published size if it ends in ``.bin``.
        storage_options: fsspec options, such as credentials; the workers use them too.

    Returns:
        A source of x (rows, 3, 32, 32) and y, int64, in the order of the files.

    Raises:
        DataError: If a file is missing, damaged, or not as published.
    """
    check_flag("train", train)
    names = _CIFAR10_FILES[train]
    choices = [f"{name}.bin" for name in names], names
    inner = "cifar-10-batches-bin", "cifar-10-batches-py"
    store, files = _found(folder, inner, choices, _CIFAR10_HOME, storage_options)
    published = _CIFAR10_PUBLISHED if verify else {}
    each = [[name] for name in files]
    return ImageFiles(store, each, _cifar10_rows, CIFAR10_CLASSES, scale, published)


def _cifar10_rows(name: str, content: bytes) -> Sequence[np.ndarray]:
    if name.endswith(".bin"):
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _CIFAR10_ROW)
        pixels, labels = rows[:, 1:], rows[:, 0]
    else:
        entry = Plain(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = entry[b"data"].array, np.asarray(entry[b"labels"])
        if labels.dtype.kind != "i":
            raise ValueError(f"it has {labels.dtype} labels")
    return pixels.reshape(-1, 3, 32, 32), labels


ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


class Dtype:
    """Stands for a numpy dtype in a pickle; only its name is read."""

    def __init__(self, kind: Any = None, *_: Any) -> None:
        self.kind = kind

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags."""


class Pixels:
    """Stands for a numpy array in a pickle, whose state numpy would trust."""

    array: np.ndarray

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Take bytes, and nothing else, as the values."""
        _, shape, dtype, fortran, raw = state
        kind = getattr(dtype, "kind", None)
        if kind not in ("u1", b"u1") or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it has an array of other values than bytes")
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order=order)


class Plain(pickle.Unpickler):
    """Reads dicts, lists, numbers, text, bytes and arrays of bytes; imports nothing.

    Example:
        >>> Plain(io.BytesIO(pickle.dumps({"a": [1, b"x"]}))).load()
        {'a': [1, b'x']}
        >>> Plain(io.BytesIO(pickle.dumps(print))).load()
        Traceback (most recent call last):
        _pickle.UnpicklingError: builtins.print is no array, and is not imported
    """

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS:
            return Pixels
        if (module, name) == ("numpy", "dtype"):
            return Dtype
        raise pickle.UnpicklingError(
            f"{module}.{name} is no array, and is not imported"
        )


# ---- MNIST and Fashion-MNIST

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt"),
    *("Sneaker", "Bag", "Ankle boot"),
)
# In bytes: a header, and 784 bytes or one for each image.
_IDX_SIZES: Mapping[str, str | int] = {
    "train-images-idx3-ubyte": 16 + 60_000 * 784,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 784,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}
# Of the same files with .gz, as in torchvision.
_FASHION_MNIST_MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
_MNIST_MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)


def fashion_mnist(
    folder: AnyPath,
    *,
    train: bool = True,
    scale: float | None = EIGHT_BITS,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> ImageFiles:
    """Take Fashion-MNIST: 70,000 grey images of 28 x 28 pixels, in 10 classes.

    The files are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the two
    that begin with ``t10k``, all ending in ``.gz`` or not, from
    https://github.com/zalandoresearch/fashion-mnist.

    Args:
        folder: A path or URL that workers reach too: the folder of the files, or one
            that has them in ``FashionMNIST/raw`` as torchvision does.
        train: The 60,000 images for training; False: the 10,000 for tests.
        scale: Factor for values of 0 to 255, which makes them float32; None: uint8.
        verify: Compare each file, once, with its published checksum, or with its
            published size if it does not end in ``.gz``.
        storage_options: fsspec options, such as credentials; the workers use them too.

    Returns:
        A source of x (rows, 1, 28, 28) and y, int64, in the order of the files.

    Raises:
        DataError: If a file is missing, damaged, or not as published.
    """
    home = "https://github.com/zalandoresearch/fashion-mnist"
    store, names = _idx_files(folder, train, "FashionMNIST", home, storage_options)
    published = _idx_published(_FASHION_MNIST_MD5) if verify else {}
    classes = FASHION_MNIST_CLASSES
    return ImageFiles(store, [names], _idx_rows, classes, scale, published)


def mnist(
    folder: AnyPath,
    *,
    train: bool = True,
    scale: float | None = EIGHT_BITS,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> ImageFiles:
    """Take MNIST: 70,000 grey images of handwritten digits, 28 x 28 pixels.

    The files have the names of :func:`fashion_mnist`, and are from
    http://yann.lecun.com/exdb/mnist/; all arguments are as there.

    Args:
        folder: The folder of the files, or one that has them in ``MNIST/raw``.
        train: The 60,000 images for training; False: the 10,000 for tests.
        scale: See :func:`fashion_mnist`.
        verify: See :func:`fashion_mnist`.
        storage_options: See :func:`fashion_mnist`.

    Returns:
        A source of x (rows, 1, 28, 28) and y, int64, in the order of the files.

    Raises:
        DataError: If a file is missing, damaged, or not as published.
    """
    home = "http://yann.lecun.com/exdb/mnist/"
    store, names = _idx_files(folder, train, "MNIST", home, storage_options)
    published = _idx_published(_MNIST_MD5) if verify else {}
    classes = tuple("0123456789")
    return ImageFiles(store, [names], _idx_rows, classes, scale, published)


def _idx_files(
    folder: AnyPath,
    train: bool,
    inner: str,
    home: str,
    options: Mapping[str, Any] | None,
) -> tuple[Store, Sequence[str]]:
    check_flag("train", train)
    plain = [n for n in _IDX_SIZES if n.startswith("train" if train else "t10k")]
    packed = [f"{name}.gz" for name in plain]
    return _found(folder, (f"{inner}/raw",), (packed, plain), home, options)


def _idx_published(checksums: Sequence[str]) -> Mapping[str, str | int]:
    packed = (f"{name}.gz" for name in _IDX_SIZES)
    return {**_IDX_SIZES, **dict(zip(packed, checksums, strict=True))}


def _idx_rows(name: str, content: bytes) -> Sequence[np.ndarray]:
    """The bytes in an IDX file; the header has a type, axes and sizes."""
    axes = 3 if "images" in name else 1
    if name.endswith(".gz"):
        content = gzip.decompress(content)
    sizes = np.frombuffer(content, ">u4", axes, 4).astype(int)
    start = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) - start != sizes.prod():
        raise ValueError(f"it is no IDX file of bytes with {axes} axes")
    array = np.frombuffer(content, np.uint8, offset=start).reshape(sizes)
    return [array if axes == 1 else array[:, None]]


# ---- TinyImageNet

_TINY_HOME = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_TINY_IMAGES = {"train": 100_000, "val": 10_000, "test": 10_000}


def tiny_imagenet(
    folder: AnyPath,
    split: str = "train",
    *,
    scale: float | None = EIGHT_BITS,
    verify: bool = True,
    seed: int | None = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> ImageFolder:
    """Take TinyImageNet: 120,000 colour images of 64 x 64 pixels, in 200 classes.

    The files are those of http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked:
    ``wnids.txt``, ``train``, ``val`` and ``test``. Workers decode the images, which
    takes most of the time: :func:`pack_files` puts them into shards, whose folder this
    function takes too.

    Args:
        folder: A path or URL that workers reach too: the folder of ``wnids.txt``, or
            the one that has it in ``tiny-imagenet-200``.
        split: "train", "val", or "test", which has no labels.
        scale: Factor for values of 0 to 255, which makes them float32; None: uint8.
        verify: Refuse a split that does not have as many images as are published.
        seed: Seed of the order of the images; None: sorted by path.
        storage_options: fsspec options, such as credentials; the workers use them too.

    Returns:
        A source of x (rows, 3, 64, 64) and y, int64: places in ``wnids.txt``.

    Raises:
        DataError: If files are missing, or not as published.
        OptionError: If Pillow is missing (extra ``images``).
    """
    check_choice("split", split, tuple(_TINY_IMAGES))
    store = store_of(folder, storage_options)
    if not Folder(store).exists("wnids.txt"):
        choices = (("wnids.txt",),)
        inner = ("tiny-imagenet-200",)
        store, _ = _found(folder, inner, choices, _TINY_HOME, storage_options)
    source = image_folder(
        store.url,
        size=64,
        scale=scale,
        split=split,
        seed=seed,
        storage_options=storage_options,
    )
    found, published = len(source.paths), _TINY_IMAGES[split]
    if verify and found != published:
        raise DataError(
            f"{store.url_of(split)} has {found} images, and the published one "
            f"{published}; {_AS_IT_IS}"
        )
    return source


# ---- MovieLens


class Ratings(NamedTuple):
    """Ratings of items by users.

    Attributes:
        X: ``{"user": ..., "item": ...}``, int64 (rows,): places in `users` and `items`.
        y: Ratings, float32 (rows,).
        users: The published numbers of the users, sorted.
        items: The published numbers of the items, sorted.
    """

    X: dict[str, np.ndarray]
    y: np.ndarray
    users: np.ndarray
    items: np.ndarray


_SEPARATORS = {"ratings.csv": ",", "ratings.dat": "::", "u.data": "\t"}


def movielens(
    folder: AnyPath, *, storage_options: Mapping[str, Any] | None = None
) -> Ratings:
    """Take the ratings of MovieLens, or of a table in one of its forms.

    The file is ``ratings.csv``, ``ratings.dat`` (1M, 10M) or ``u.data`` (100K) from
    https://grouplens.org/datasets/movielens/, unpacked. Its first three columns are
    user, item and rating. It is read into memory, 20 bytes for each rating; no checksum
    is compared.

    Args:
        folder: A path or URL of the folder with that file.
        storage_options: fsspec options, such as credentials.

    Returns:
        The ratings in the order of the file: ``fit(ratings.X, ratings.y)``.

    Raises:
        DataError: If there is no such file, or it is damaged.
        OptionError: If pandas is missing (extra ``dataframe``).
    """
    choices = [(name,) for name in _SEPARATORS]
    home = "https://grouplens.org/datasets/movielens/"
    store, (name,) = _found(folder, (), choices, home, storage_options)
    content, separator = store.read(name), _SEPARATORS[name]
    if separator == "::":  # pandas is many times as fast with a single character
        content, separator = content.replace(b"::", b"\t"), "\t"
    with reading(store.url_of(name)):
        frame = optional_module("pandas").read_csv(
            io.BytesIO(content),
            sep=separator,
            header=0 if name.endswith(".csv") else None,
            names=["user", "item", "rating"],
            usecols=[0, 1, 2],
            dtype={"user": np.int64, "item": np.int64, "rating": np.float32},
        )
        if not len(frame) or frame["rating"].isna().any():
            raise ValueError("each row must have a rating, and there must be some")
    users, user = np.unique(frame["user"], return_inverse=True)
    items, item = np.unique(frame["item"], return_inverse=True)
    ratings = frame["rating"].to_numpy()
    return Ratings({"user": user, "item": item}, ratings, users, items)
