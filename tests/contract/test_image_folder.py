"""Folders of images as rows: which image, which class, in which order."""

import io
import logging
import pickle
import re
import sys

import numpy as np
import pytest
from PIL import Image

from daskdl.data.images import Decoding, image_folder
from daskdl.data.packing import pack
from daskdl.data.storage import OpenBytes, Store
from daskdl.errors import DataError, OptionError
from tests.support.pictures import encoded, folder, pixels

NAMES = [f"{label}/{i}.png" for label in ("cat", "ant", "bee") for i in range(5)]


@pytest.fixture(params=["local", "memory", "packed"])
def url(request, tmp_path):
    """The same images in a folder, at a URL, and packed."""
    here = tmp_path / "images" if request.param != "memory" else "memory://pictures"
    store = folder(here, NAMES)
    if request.param == "packed":
        pack(here, url=tmp_path / "packed", per_file=4, client=False)
        yield str(tmp_path / "packed")
    else:
        yield store.url
    store.delete_all()


def everything(source):
    """All rows, by the path of each."""
    loaded = [source.load(part) for part in range(source.parts)]
    x = np.concatenate([x for x, _ in loaded])
    y = [None] * len(x)
    if loaded[0][1] is not None:
        y = np.concatenate([y for _, y in loaded]).tolist()
    return {name: (x[i], y[i]) for i, name in enumerate(source.paths)}


def labelled(source):
    """The class of each path."""
    rows = everything(source)
    return {name: source.classes[label] for name, (_, label) in rows.items()}


def test_each_image_comes_once_with_its_own_pixels_and_label(url):
    source = image_folder(url, scale=None)

    rows = everything(source)

    assert sorted(rows) == sorted(source.paths) == sorted(NAMES)
    for seed, name in enumerate(NAMES):
        x, y = rows[name]
        np.testing.assert_array_equal(x, pixels(seed).transpose(2, 0, 1))
        assert source.classes[y] == name.split("/", maxsplit=1)[0]


def test_it_knows_its_lengths_and_what_a_row_is_like(url):
    source = pickle.loads(pickle.dumps(image_folder(url, files_per_part=4)))

    lengths = [len(source.load(part)[0]) for part in range(source.parts)]

    assert list(source.lengths) == lengths == [4, 4, 4, 3]
    assert source.first_rows[0].shape == (1, 3, 4, 6) == (1, *source.shape)
    assert source.first_rows[1].tolist() == source.load(0)[1][:1].tolist()
    assert source.classes == ["ant", "bee", "cat"]
    assert [part.dtype for part in source.load(0)] == [np.float32, np.int64]


@pytest.mark.parametrize("split", [None, "train"])
def test_folders_within_a_class_are_of_the_class(tmp_path, split):
    """As in torchvision's `ImageFolder`."""
    names = [
        "cat/images/1.png",
        "cat/2.png",
        "dog/images/1.png",
        "dog/old/images/2.png",
    ]
    folder(tmp_path, [f"{split}/{name}" if split else name for name in names])

    source = image_folder(tmp_path, split=split)

    inner = [path.removeprefix("train/") for path in source.paths]
    _, y = source.load(0)
    assert [source.classes[label] for label in y] == [path[:3] for path in inner]


def test_classes_are_mixed_in_the_same_order_each_time(tmp_path):
    folder(tmp_path, NAMES)

    mixed = image_folder(tmp_path, files_per_part=5)

    assert all(len(set(mixed.load(part)[1])) > 1 for part in range(3))
    assert mixed.paths == image_folder(tmp_path).paths
    assert mixed.paths != image_folder(tmp_path, seed=1).paths
    assert image_folder(tmp_path, seed=None).paths == sorted(NAMES)


def test_the_size_is_that_of_the_first_image_that_can_be_read(tmp_path):
    store = folder(tmp_path, ["a/1.png", "a/2.png", "a/3.png"])
    store.write("a/1.png", b"no image")
    store.write("a/3.png", encoded(pixels(1, (9, 3, 3))))

    source = image_folder(tmp_path, seed=None)

    where = re.escape(store.url_of("a/2.png"))
    assert source.first_rows[0].shape == (1, 3, 4, 6)
    message = f"3.png has 9 x 3, but {where} has 4 x 6 .* give size="
    with pytest.raises(DataError, match=message):
        source.pieces(0)[2][1]()


@pytest.mark.parametrize(
    ("scale", "dtype"), [(None, "uint8"), (1.0, "float32")], ids=["bytes", "floats"]
)
def test_with_a_size_no_image_has_to_be_opened_to_know_the_shape(
    tmp_path, scale, dtype
):
    store = folder(tmp_path, ["a/1.png", "b/1.png"])
    for name in store.names():
        store.write(name, b"no image")

    source = image_folder(tmp_path, size=(5, 7), channels=1, scale=scale)
    for seed, name in enumerate(store.names()):
        store.write(name, encoded(pixels(1, (9, 3 + seed, 3))))

    x, y = source.first_rows
    assert (x.shape, x.dtype) == ((1, 1, 5, 7), dtype)
    assert y.shape == (1,)
    assert source.load(0)[0].shape == (2, 1, 5, 7)


def test_other_files_are_passed_over_and_counted(tmp_path, caplog):
    store = folder(tmp_path, ["a/1.png", "a/2.PNG", "b/1.png"])
    for name in ("a/notes.txt", "README.md", "a/._1.png", ".cache/1.png"):
        store.write(name, b"?")

    with caplog.at_level(logging.INFO, "daskdl"):
        source = image_folder(tmp_path)

    assert sorted(source.paths) == ["a/1.png", "a/2.PNG", "b/1.png"]
    assert f"4 of 7 files in {tmp_path} are not images" in caplog.text


@pytest.mark.parametrize("extensions", ["xyz", [".XYZ"]])
def test_other_extensions_may_be_images(tmp_path, extensions):
    store = folder(tmp_path, ["a/1.png"])
    store.write("a/2.xyz", encoded(pixels(1)))

    assert image_folder(tmp_path, extensions=extensions).paths == ["a/2.xyz"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("", {}, "^{} has no images; "),
        ("a/1.txt", {}, "^{} has no images, but 1 other"),
        ("1.png a/2.png", {}, r"^{}/1\.png is in no class folder; "),
        ("t/1.png t/a/2.png", {"split": "t"}, r"^{}/t/1\.png is in no"),
        ("a/1.png b/x.txt", {}, r"^{}/b has no images \(1 such"),
        ("train/a/1.png val/a/1.png", {}, "give split='train' or split='val'$"),
        ("a/1.png c/1.png", {"classes": ["a"]}, r"{}/c/1\.png is of the class 'c', wh"),
        ("a/1.png", {"classes": []}, "classes must be a list of"),
        ("a/1.png", {"classes": "a"}, "classes must be a list of"),
        ("a.png b.png", {"labels": {"a.png": "a"}}, r"labels has no class for {}/b\.p"),
        ("a/1.png", {"extensions": ()}, "extensions must be file extensions"),
        ("a/1.png", {"extensions": [1]}, "extensions must be file extensions"),
        ("a/1.png", {"files_per_part": 0}, "files_per_part must be"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, names, options, message):
    folder(tmp_path, names.split())

    with pytest.raises(
        (DataError, OptionError), match=message.format(re.escape(str(tmp_path)))
    ):
        image_folder(tmp_path, **options)


def test_a_split_may_lack_images_of_classes_that_are_given(tmp_path):
    folder(tmp_path, ["train/a/1.png", "train/b/1.png", "test/b/2.png"])
    (tmp_path / "test" / "a").mkdir()
    train = image_folder(tmp_path, split="train/")

    test = image_folder(tmp_path, split="test", classes=train.classes)

    assert sorted(train.paths) == ["train/a/1.png", "train/b/1.png"]
    assert test.paths == ["test/b/2.png"]
    assert test.load(0)[1].tolist() == [1]


@pytest.mark.parametrize(
    "labels",
    [lambda path: path[:3], {"dog1.png": "dog", "x/cat2.png": "cat"}, False],
    ids=["function", "table", "none"],
)
def test_labels_may_come_from_elsewhere_or_not_at_all(tmp_path, labels):
    names = ["dog1.png"] if callable(labels) else ["dog1.png", "x/cat2.png"]
    folder(tmp_path, names)

    source = image_folder(tmp_path, labels=labels)

    if labels is False:
        assert (source.classes, source.first_rows[1], source.load(0)[1]) == (None,) * 3
        assert sorted(source.paths) == names
        return
    known = {"dog1.png": "dog", "x/cat2.png": "cat"}
    assert source.classes == sorted(known[name] for name in names)
    assert labelled(source) == {name: known[name] for name in names}


def test_a_packed_folder_has_each_name_once_and_none_of_other_splits(tmp_path):
    names = [f"{split}/{name}" for split in ("train", "val") for name in NAMES]
    folder(tmp_path / "in", names)
    pack(tmp_path / "in", url=tmp_path / "packed", per_file=4, client=False)

    source = image_folder(tmp_path / "packed", split="train", size=4)

    text = pickle.dumps(source).replace(source.groups[0].url(0).encode(), b"")
    counts = {name: text.count(name.encode()) for name in names}
    assert counts == {name: int(name.startswith("train/")) for name in names}


class TestTinyImageNet:
    WNIDS = ("n02", "n01", "n03")

    @pytest.fixture(params=["loose", "packed"])
    def root(self, request, tmp_path):
        names = [f"train/{w}/images/{w}_{i}.JPEG" for w in self.WNIDS for i in range(2)]
        names += [f"val/images/val_{i}.JPEG" for i in range(3)]
        store = folder(tmp_path / "tiny", [*names, "test/images/test_0.JPEG"])
        store.write("wnids.txt", "\n".join(self.WNIDS).encode())
        annotations = "".join(
            f"val_{i}.JPEG\t{w}\t0\t0\t9\t9\n" for i, w in enumerate(self.WNIDS)
        )
        store.write("val/val_annotations.txt", annotations.encode())
        for wnid in self.WNIDS:
            store.write(f"train/{wnid}/{wnid}_boxes.txt", b"?")
        if request.param == "loose":
            return store
        pack(tmp_path / "tiny", url=tmp_path / "packed", per_file=5, client=False)
        return Store(str(tmp_path / "packed"))

    def test_classes_are_in_the_order_of_the_file_and_validation_is_annotated(
        self, root
    ):
        train, val = (image_folder(root.url, split=name) for name in ("train", "val"))
        test = image_folder(root.url, split="test")

        assert train.classes == val.classes == ["n02", "n01", "n03"]
        assert labelled(train) == {
            f"train/{w}/images/{w}_{i}.JPEG": w for w in self.WNIDS for i in range(2)
        }
        assert labelled(val) == {
            f"val/images/val_{i}.JPEG": w for i, w in enumerate(self.WNIDS)
        }
        assert test.paths == ["test/images/test_0.JPEG"]
        assert test.load(0)[1] is None

    def test_classes_may_be_given_in_another_order(self, root):
        source = image_folder(root.url, split="val", classes=["n01", "n02", "n03"])

        assert source.classes == ["n01", "n02", "n03"]
        assert labelled(source)["val/images/val_0.JPEG"] == "n02"

    def test_a_split_must_be_chosen(self, root):
        with pytest.raises(OptionError, match='split must be "train", "val" or "test"'):
            image_folder(root.url)


class TestDamagedTinyImageNet:
    @pytest.fixture
    def root(self, tmp_path):
        names = ["train/n1/images/1.JPEG", "val/images/v.JPEG"]
        store = folder(tmp_path, names)
        store.write("wnids.txt", b"n1\n")
        store.write("val/val_annotations.txt", b"v.JPEG\tn1\t0\t0\t9\t9\n")
        return store

    @pytest.mark.parametrize(
        ("name", "content", "split", "message"),
        [
            ("wnids.txt", b"n1\nn2\n", "train", r"train/n2 has no images \(1 such"),
            ("wnids.txt", b"n2\n", "train", r"the class 'n1', which is not in .*wnids"),
            (
                "val/val_annotations.txt",
                b"w.JPEG\tn1\n",
                "val",
                r"val/images/v\.JPEG has no class from .*val_annotations",
            ),
        ],
        ids=["empty class", "unknown class", "no annotation"],
    )
    def test_what_does_not_fit_is_named(self, root, name, content, split, message):
        assert labelled(image_folder(root.url, split="val")) == {
            "val/images/v.JPEG": "n1"
        }
        root.write(name, content)

        with pytest.raises(DataError, match=message):
            image_folder(root.url, split=split)


def decoded(content, **options):
    """The pixels of one image."""
    return Decoding(**{"scale": None, **options})(OpenBytes(content, "s3://b/x.png"))


class TestDecoding:
    """What Pillow reads, in one shape, one dtype and one range."""

    def test_pixels_come_with_channels_first(self):
        values = pixels(0)
        values[0, 0] = (0, 51, 255)

        image = decoded(encoded(values))
        scaled = decoded(encoded(values), scale=1 / 255)

        np.testing.assert_array_equal(image, values.transpose(2, 0, 1))
        assert (image.dtype, scaled.dtype) == (np.uint8, np.float32)
        assert image.flags.c_contiguous
        assert scaled[:, 0, 0].tolist() == pytest.approx([0, 0.2, 1])

    @pytest.mark.parametrize("channels", [1, 3, 4])
    @pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 4)], ids=str)
    def test_any_image_gets_the_channels_asked_for(self, channels, shape):
        values = pixels(0, shape)

        image = decoded(encoded(values), channels=channels)

        assert image.shape == (channels, 4, 6)
        if shape == (4, 6):
            np.testing.assert_array_equal(image[:3], np.stack([values] * channels)[:3])

    def test_an_image_is_resized_to_height_and_width(self):
        values = np.zeros((8, 8, 3), np.uint8)
        values[:4] = 200  # the upper half

        image = decoded(encoded(values), size=(4, 2))

        assert image.shape == (3, 4, 2)
        reference = Image.fromarray(values).resize((2, 4), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(image, np.asarray(reference).transpose(2, 0, 1))

    def test_an_image_is_turned_as_its_exif_data_say(self):
        values = np.zeros((16, 32, 3), np.uint8)
        values[:, :16] = 255  # left half white
        exif = Image.Exif()
        exif[0x0112] = 6  # turn by 90 degrees clockwise: left becomes top

        image = decoded(encoded(values, "JPEG", quality=95, exif=exif))

        assert image.shape == (3, 32, 16)
        assert image[:, :12].min() > 250
        assert image[:, 20:].max() < 5

    def test_a_large_photo_is_much_as_if_resized_from_all_its_pixels(self):
        coarse = Image.fromarray(pixels(0, (40, 60, 3)))
        photo = np.asarray(coarse.resize((1200, 800), Image.Resampling.BILINEAR))

        image = decoded(encoded(photo, "JPEG"), size=(100, 150))

        with Image.open(io.BytesIO(encoded(photo, "JPEG"))) as whole:
            exact = np.asarray(whole.resize((150, 100), Image.Resampling.BILINEAR))
        difference = np.abs(image.astype(int) - exact.transpose(2, 0, 1))
        assert difference.mean() < 1.5
        assert difference.max() < 16

    def test_grey_values_of_sixteen_bits_keep_the_upper_eight(self):
        values = np.array([[0, 255, 256], [0x1234, 0x8000, 0xFFFF]], np.uint16)

        image = decoded(encoded(values), channels=1)

        assert image.tolist() == [[[0, 0, 1], [0x12, 0x80, 0xFF]]]

    def test_a_palette_with_transparency_keeps_its_colors(self):
        file = io.BytesIO()
        image = Image.fromarray(pixels(0, (4, 6))).convert("P")
        image.save(file, "PNG", transparency=bytes(range(256)))

        assert len(np.unique(decoded(file.getvalue(), channels=4)[3])) > 1
        assert decoded(file.getvalue()).shape == (3, 4, 6)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "cannot identify image file s3://b/x.png"),
            (encoded(pixels(0, (64, 64, 3)))[:2000], "truncated"),
            (encoded(np.full((2, 2), 1e6, "float32"), "TIFF"), "its pixels .* loader"),
            (encoded(np.full((2, 2), 10**6, "int32"), "TIFF"), "its pixels .* loader"),
        ],
        ids=["empty", "png", "floats", "wide"],
    )
    def test_a_file_that_cannot_be_decoded_is_named(self, content, reason):
        with pytest.raises(DataError, match=rf"^cannot read s3://b/x\.png: .*{reason}"):
            decoded(content)

    def test_an_image_that_would_fill_the_memory_is_refused(self):
        content = bytearray(encoded(pixels(0), "BMP"))
        content[18:26] = (60_000).to_bytes(4, "little") * 2  # width and height

        with pytest.raises(DataError, match=r"cannot read .*exceeds limit"):
            decoded(bytes(content))

    @pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged tags
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
    def test_damage_anywhere_gives_pixels_or_a_data_error(self, kind):
        content = encoded(pixels(0, (16, 16, 3)), kind)
        rng = np.random.default_rng(0)
        unreadable = 0

        for _ in range(150):
            damaged = bytearray(content)
            damaged[rng.integers(len(damaged))] = rng.integers(256)
            try:
                decoded(bytes(damaged), size=(8, 8))
            except DataError:
                unreadable += 1

        assert unreadable > 0

    @pytest.mark.parametrize("size", [np.uint8(200), np.array([200, 200])], ids=repr)
    def test_a_size_may_be_of_numpy(self, size):
        photo = encoded(pixels(0, (900, 600, 3)), "JPEG")

        image = decoded(photo, size=size)

        np.testing.assert_array_equal(image, decoded(photo, size=200))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"size": 0}, r"size must be .* got 0"),
            ({"size": (1, 2, 3)}, r"size must be .* got \(1, 2, 3\)"),
            ({"size": (8.5, 8)}, r"size must be .* got \(8.5, 8\)"),
            ({"channels": 2}, "channels must be 1, 3 or 4, got 2"),
            ({"scale": 0}, "scale must be > 0 and finite, or None, got 0"),
            ({"scale": float("nan")}, "scale must be .* got nan"),
        ],
    )
    def test_options_outside_what_is_allowed_are_refused(self, options, message):
        with pytest.raises(OptionError, match=message):
            image_folder("memory://nowhere", **options)

    def test_without_pillow_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)

        with pytest.raises(OptionError, match=r"pip install 'daskdl\[images\]"):
            image_folder("memory://nowhere")
