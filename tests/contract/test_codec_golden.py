"""Frames of version 1, kept for good: every later release reads and makes them."""

import hashlib

import lz4.block
import numpy as np
import pytest

from daskdl.codec import decode
from tests.golden.make_v1 import FOLDER, UPDATES, frame_of

# A file that is made anew is a format that has changed.
SHA256 = {
    "bitmap": "71ca48766b73b77518b483c230f9298bbca0fe934b76a74437e78f76d7078914",
    "bitmap_lz4": "8d94cea082399d5f22a98ccdf834136126ac0898640181d7f249971e9a616917",
    "dense8": "5b516440d6376a1a03d1e397247477d78293f10b9d6b9cef286fe5142da95156",
    "dense8_lz4": "42f0ebcbbc7d6afd747812ee307ba6841b26f9a9edd8b04cea9d710d7a77103e",
    "dense32": "30654661d31f2a5a399bc75f48ec53efc262ac1ecc9b2243bb970334ccd04149",
    "dense32_lz4": "26ad60bd6becfc12ca512132ee2403881050da3e8b29e01bc1934b4734dc8bcd",
    "gaps_blocks": "cc8c6eb8eb7d21bb3797b8d8c5f0494d194a00153eb5f06f7578ff628b91ff04",
    "gaps_lz4": "1e03851b8e598ca133ff2ca640a455207cad51b90a48ab60bc3a9417a78d5e91",
    "gaps_one": "a9e748d78aca74b7f8601b5cc34ca999d99d1ad9c71922c96760d20b187955ca",
    "levels": "80e1c53147e6955c3766d12b991c9ba0d60e87009f9024ba6ec9158b755341df",
    "levels_ends": "34a748dfc223f08a32b830110135a66af81f3d560456ba2630b77e46417c7903",
    "levels_lz4": "267720cf40a751cd50feac9c64fc670047bad1b4d3af8b98e9b7c397c5dd835f",
    "raw32": "f37ca09f9dcfa2b316655ea4df49b1d5675c25643e6a3e7d9dd34e4d4fb7c28b",
    "raw32_empty": "9af5424539784d64f63c508a7f19f999d19c1f52b68f8fdf192619abbba00e5a",
    "raw32_ends": "cef9866775d78acb831a124b9e64bf57d98cca4eefe0e51dc33c7544d7ff2b9a",
}


def body_of(frame):
    """What the payload stands for: lz4 may pack it otherwise in another release."""
    length = int.from_bytes(frame[48:56], "little")
    if frame[6]:
        return lz4.block.decompress(frame[64:], uncompressed_size=length)
    return frame[64:]


def test_every_file_has_an_update_and_a_checksum():
    files = {path.stem for path in FOLDER.glob("*.bin")}

    assert files == set(UPDATES) == set(SHA256)


@pytest.mark.parametrize("name", UPDATES)
class TestGoldenFrame:
    def test_the_file_is_unchanged(self, name):
        frame = (FOLDER / f"{name}.bin").read_bytes()

        assert hashlib.sha256(frame).hexdigest() == SHA256[name]

    def test_it_is_decoded(self, name):
        expected = UPDATES[name]

        update = decode((FOLDER / f"{name}.bin").read_bytes())

        assert update._fields == expected._fields
        for value, of_update in zip(update, expected, strict=True):
            np.testing.assert_array_equal(value, of_update)

    def test_it_is_encoded_bit_for_bit(self, name):
        golden = (FOLDER / f"{name}.bin").read_bytes()

        encoded = frame_of(UPDATES[name]).tobytes()

        assert body_of(encoded) == body_of(golden)
        assert encoded[:60] == golden[:60]
        assert golden[6] or encoded == golden
