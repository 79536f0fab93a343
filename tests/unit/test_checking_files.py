"""The sources whose parts are made of files: each can be named, and loaded alone."""

import numpy as np
import pytest

from daskdl.data.files import Files
from daskdl.data.formats import FromBytes, OneExample
from daskdl.data.images import image_folder
from daskdl.data.shards import Shards, file_batches
from daskdl.data.storage import Store
from daskdl.data.validate import OfFiles, validate
from tests.support.pictures import folder

LOADER = OneExample(
    FromBytes(lambda content: (np.array([float(content)]), len(content)))
)
NAMES = [f"{label}/{i}.png" for label in ("ant", "bee") for i in range(5)]


@pytest.fixture
def numbers(tmp_path):
    """Seven files of one number each."""
    store = Store(str(tmp_path / "numbers"))
    for i in range(7):
        store.write(f"{i}.txt", str(10**i).encode())
    return store


def files(store):
    return Files(store.url, LOADER, files_per_part=3)


def shards(store):
    url = f"{store.url}-packed"
    file_batches(store.url, url, 3, client=False)
    return Shards(url, LOADER)


def tables(store):
    return Files(store.url, FromBytes(lambda content: (np.zeros((2, 1)), np.arange(2))))


def images(store):
    pictures = folder(f"{store.url}-images", NAMES)
    return image_folder(pictures.url, files_per_part=3)


def unlabelled(store):
    pictures = folder(f"{store.url}-images", NAMES)
    return image_folder(pictures.url, files_per_part=3, labels=False)


KINDS = [files, shards, tables, images, unlabelled]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_a_part_have_its_rows(numbers, kind):
    source = kind(numbers)

    for part in range(source.parts):
        x, y = source.load(part)
        count = len(source.file_urls(part))
        loaded = [source.load_file(part, file) for file in range(count)]
        np.testing.assert_array_equal(np.concatenate([one for one, _ in loaded]), x)
        if y is None:
            assert all(label is None for _, label in loaded)
        else:
            np.testing.assert_array_equal(np.concatenate([own for _, own in loaded]), y)


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_is_in_one_part(numbers, kind):
    source = kind(numbers)

    urls = [url for part in range(source.parts) for url in source.file_urls(part)]

    assert isinstance(source, OfFiles)
    assert len(urls) == len(set(urls)) == (10 if kind in (images, unlabelled) else 7)


def test_the_one_file_of_a_group_that_is_damaged_goes_to_quarantine(numbers, tmp_path):
    numbers.write("4.txt", b"torn")

    report = validate(files(numbers), quarantine=tmp_path / "bad", client=False)

    assert (report.parts, report.files, report.rows) == (3, 7, 6)
    (offender,) = report.offenders
    assert offender[:3] == (numbers.url_of("4.txt"), None, "unreadable")
    assert Store(str(tmp_path / "bad")).names() == ["4.txt"]
    assert "4.txt" not in numbers.names()
    assert validate(files(numbers), client=False).ok


def test_the_one_image_that_is_damaged_goes_to_quarantine_with_its_class(tmp_path):
    pictures = folder(tmp_path / "images", NAMES)
    source = image_folder(pictures.url, files_per_part=4)
    pictures.write("bee/2.png", pictures.read("bee/2.png")[:60])

    report = validate(source, labels=2, quarantine=tmp_path / "bad", client=False)

    assert report.counts["unreadable"] == sum(report.counts.values()) == 1
    assert Store(str(tmp_path / "bad")).names() == ["bee/2.png"]


def test_what_is_wrong_in_a_shard_is_named_and_left_there(numbers, tmp_path):
    numbers.write("4.txt", b"nan")

    report = validate(shards(numbers), quarantine=tmp_path / "bad", client=False)

    (offender,) = report.offenders
    assert offender.part.startswith("zip://4.txt::")
    assert offender.kind == "non-finite"
    assert [move.reason for move in report.moved] == ["it is packed with others"]


def test_a_file_deleted_since_is_missing(numbers):
    source = files(numbers)
    numbers.delete(["2.txt"])

    report = validate(source, client=False)

    assert report.counts["missing"] == sum(report.counts.values()) == 1
    assert report.offenders[0].part == numbers.url_of("2.txt")


def test_paths_with_a_loader_are_validated_as_they_are_trained_on(numbers):
    report = validate(numbers.url, loader=LOADER, client=False, shapes=(2,))

    assert report.files == 7
    assert report.counts["wrong shape"] == 7
