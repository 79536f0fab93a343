"""Images as arrays: what Pillow reads, in one shape, one dtype and one range."""

import builtins
import io

import numpy as np
import pytest
from PIL import Image

from daskdl.data.images import Decoding
from daskdl.errors import DataError, OptionError
from tests.support.pictures import encoded, pixels

BYTES = Decoding(scale=None)


def test_pixels_come_with_channels_first():
    values = pixels(0)

    image = BYTES(encoded(values), "a.png")

    np.testing.assert_array_equal(image, values.transpose(2, 0, 1))
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous


def test_values_are_scaled_to_one():
    values = pixels(0)
    values[0, 0] = (0, 51, 255)

    image = Decoding()(encoded(values), "a.png")

    assert image.dtype == np.float32
    assert image[:, 0, 0].tolist() == pytest.approx([0, 0.2, 1])
    np.testing.assert_allclose(image, values.transpose(2, 0, 1) / 255, rtol=1e-6)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 4)], ids=str)
def test_any_image_gets_the_channels_asked_for(channels, shape):
    image = Decoding(channels=channels)(encoded(pixels(0, shape)), "a.png")

    assert image.shape == (channels, 4, 6)


def test_grey_values_are_the_same_in_each_channel():
    values = pixels(0, (4, 6))

    image = BYTES(encoded(values), "a.png")

    np.testing.assert_array_equal(image, np.stack([values] * 3))


def test_an_image_is_resized_to_height_and_width():
    values = np.zeros((8, 8, 3), np.uint8)
    values[:4] = 200  # the upper half

    image = Decoding(size=(4, 2), scale=None)(encoded(values), "a.png")

    assert image.shape == (3, 4, 2)
    assert (image[:, 0] == 200).all()
    assert (image[:, -1] == 0).all()
    reference = Image.fromarray(values).resize((2, 4), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(image, np.asarray(reference).transpose(2, 0, 1))


def test_an_image_is_turned_as_its_exif_data_say():
    values = np.zeros((16, 32, 3), np.uint8)
    values[:, :16] = 255  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: left becomes top

    image = BYTES(encoded(values, "JPEG", quality=95, exif=exif), "a.jpg")

    assert image.shape == (3, 32, 16)
    assert image[:, :12].min() > 250
    assert image[:, 20:].max() < 5


def test_a_large_photo_is_much_as_if_resized_from_all_its_pixels():
    coarse = Image.fromarray(pixels(0, (40, 60, 3)))
    photo = np.asarray(coarse.resize((1200, 800), Image.Resampling.BILINEAR))

    image = Decoding((100, 150), scale=None)(encoded(photo, "JPEG"), "a.jpg")

    with Image.open(io.BytesIO(encoded(photo, "JPEG"))) as whole:
        exact = np.asarray(whole.resize((150, 100), Image.Resampling.BILINEAR))
    difference = np.abs(image.astype(int) - exact.transpose(2, 0, 1))
    assert difference.mean() < 1.5
    assert difference.max() < 16


def test_grey_values_of_sixteen_bits_keep_the_upper_eight():
    values = np.array([[0, 255, 256], [0x1234, 0x8000, 0xFFFF]], np.uint16)

    image = Decoding(channels=1, scale=None)(encoded(values), "a.png")

    assert image.tolist() == [[[0, 0, 1], [0x12, 0x80, 0xFF]]]


def test_a_palette_with_transparency_keeps_its_colours():
    file = io.BytesIO()
    image = Image.fromarray(pixels(0, (4, 6))).convert("P")
    image.info["transparency"] = bytes(range(256))
    image.save(file, "PNG", transparency=bytes(range(256)))

    decoded = Decoding(channels=4, scale=None)(file.getvalue(), "a.png")

    assert len(np.unique(decoded[3])) > 1
    assert BYTES(file.getvalue(), "a.png").shape == (3, 4, 6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not an image"),
        (b"not an image", "it is not an image"),
        (encoded(pixels(0, (64, 64, 3)))[:2000], "truncated"),
        (encoded(pixels(0, (64, 64, 3)), "JPEG")[:2000], "truncated"),
    ],
    ids=["empty", "text", "png", "jpeg"],
)
def test_a_file_that_cannot_be_decoded_is_named(content, reason):
    with pytest.raises(DataError, match=rf"^cannot read s3://b/x\.png: .*{reason}"):
        BYTES(content, "s3://b/x.png")


def test_an_image_that_would_fill_the_memory_is_refused():
    content = bytearray(encoded(pixels(0), "BMP"))
    content[18:26] = (60_000).to_bytes(4, "little") * 2  # width and height

    with pytest.raises(DataError, match=r"cannot read x\.bmp: .*exceeds limit"):
        BYTES(bytes(content), "x.bmp")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged tags
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_damage_anywhere_gives_pixels_or_a_data_error(kind):
    content = encoded(pixels(0, (16, 16, 3)), kind)
    rng = np.random.default_rng(0)
    unreadable = 0

    for _ in range(150):
        damaged = bytearray(content)
        damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            Decoding(size=(8, 8))(bytes(damaged), "x")
        except DataError:
            unreadable += 1

    assert unreadable > 0


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_that_eight_bits_cannot_hold_are_refused(mode):
    file = io.BytesIO()
    Image.fromarray(np.full((2, 2), 1e6)).convert(mode).save(file, "TIFF")

    with pytest.raises(DataError, match=r"cannot read x\.tif: its pixels .* loader"):
        BYTES(file.getvalue(), "x.tif")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 3, 1.0), r"size must be .* got 0"),
        (((1, 2, 3), 3, 1.0), r"size must be .* got \(1, 2, 3\)"),
        (((8.5, 8), 3, 1.0), r"size must be .* got \(8.5, 8\)"),
        ((True, 3, 1.0), "size must be .* got True"),
        ((8.0, 3, 1.0), "size must be .* got 8.0"),
        ((None, 2, 1.0), "channels must be 1, 3 or 4, got 2"),
        ((None, [3], 1.0), r"channels must be 1, 3 or 4, got \[3\]"),
        ((None, 3, 0), "scale must be > 0 and finite, or None, got 0"),
        ((None, 3, float("nan")), "scale must be .* got nan"),
    ],
)
def test_options_outside_what_is_allowed_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        Decoding.of(*arguments)


def test_without_pillow_it_says_what_to_install(monkeypatch):
    content, found = encoded(pixels(0)), builtins.__import__

    def without(name, *arguments):
        if name == "PIL":
            raise ImportError(name)
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(OptionError, match=r"pip install daskdl\[images\]"):
        BYTES(content, "a.png")
