"""From the bytes of an image file to an array, with Pillow. No files, no labels."""

import io
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from daskdl.errors import DataError, OptionError

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
