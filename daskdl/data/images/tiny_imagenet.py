"""The layout of TinyImageNet: 200 classes named by WordNet's identifiers.

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

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from daskdl.data.images.layouts import Layout, images_in
from daskdl.data.shards.folder import Folder
from daskdl.errors import DataError, OptionError

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
