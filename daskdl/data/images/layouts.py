"""How the files of an image folder say which class each image belongs to.

Paths and small text files only; no image is opened.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from daskdl.data.shards.folder import Folder
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)

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
