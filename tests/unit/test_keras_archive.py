"""What a file says of itself is not believed: it could name others, or be a bomb."""

import contextlib
import io
import random
import re
import zipfile

import h5py
import numpy as np
import pytest

from daskdl.errors import DaskDLError, ModelError
from daskdl.keras import from_saved
from daskdl.keras.load import description
from tests.support.keras_models import rewritten, small

WEIGHTS = "model.weights.h5"
KERNEL = "layers/dense/vars/0"  # of shape (4, 3)
FUZZED = 300  # each takes less than a millisecond
HEAD, TAIL = 600, 400  # bytes of what is read first, and of where everything is


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "small.keras"
    small().save(path)
    return path


@pytest.fixture
def secret(tmp_path):
    """Twelve numbers in a file that is none of the model's, and in one of HDF5."""
    (tmp_path / "secret").write_bytes(np.arange(12, dtype="<f4").tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["numbers"] = np.arange(12, dtype="<f4").reshape(4, 3)
    return tmp_path / "secret"


def outside(weights, secret):
    where = [(str(secret), 0, 48)]
    weights.create_dataset(KERNEL, (4, 3), "<f4", external=where)


def assembled(weights, secret):
    layout = h5py.VirtualLayout((4, 3), "<f4")
    layout[:] = h5py.VirtualSource(f"{secret}.h5", "numbers", (4, 3))
    weights.create_virtual_dataset(KERNEL, layout)


def linked(weights, secret):
    weights[KERNEL] = h5py.ExternalLink(f"{secret}.h5", "numbers")


def elsewhere(weights, secret):
    weights["numbers"] = np.zeros((4, 3), "<f4")
    weights[KERNEL] = h5py.SoftLink("/numbers")


def words(weights, secret):
    weights.create_dataset(KERNEL, data=["word"] * 3)


def round_in_circles(weights, secret):
    weights["layers/dense/vars/again"] = weights["layers"]
    endless(weights, secret)


def endless(weights, secret):
    weights.create_dataset(KERNEL, (10**15,), "<f4", chunks=(1000,))


def with_kernel(saved, target, change, secret):
    """The file, with other weights in place of the kernel."""
    with zipfile.ZipFile(saved) as archive:
        held = io.BytesIO(archive.read(WEIGHTS))
    with h5py.File(held, "r+") as weights:
        assert weights[KERNEL].shape == (4, 3)
        del weights[KERNEL]
        change(weights, secret)
    return rewritten(saved, target, **{WEIGHTS: held.getvalue()})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (outside, f"the numbers of '{KERNEL}' are in another file"),
        (assembled, f"the numbers of '{KERNEL}' are in another file"),
        (linked, f"'{KERNEL}' is a ExternalLink"),
        (elsewhere, f"'{KERNEL}' is a SoftLink"),
        (words, f"'{KERNEL}' has no numbers"),
        (endless, "they would take 4000000000000012 bytes, and those of its model at "),
        (round_in_circles, "they would take 4000000000000012 bytes, and those of its "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_weights_that_are_not_in_the_file_are_refused(
    saved, tmp_path, secret, change, fault
):
    path = with_kernel(saved, tmp_path / "other.keras", change, secret)

    with pytest.raises(ModelError, match=re.escape(f"does not write: {fault}")):
        from_saved(path)


def test_weights_of_any_size_are_not_unpacked(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("daskdl.keras.load.INDEX_BYTES", 2**16)
    bomb = {WEIGHTS: bytes(2**20)}
    path = rewritten(saved, tmp_path / "bomb.keras", zipfile.ZIP_DEFLATED, **bomb)

    with pytest.raises(ModelError, match=r"would take 1048576 bytes, .* at most 66016"):
        from_saved(path)


def test_a_file_that_was_packed_again_is_loaded(saved, tmp_path):
    path = rewritten(saved, tmp_path / "packed.keras", zipfile.ZIP_DEFLATED)

    kernel, _ = from_saved(path).get_weights()

    np.testing.assert_array_equal(kernel, from_saved(saved).get_weights()[0])


@pytest.mark.parametrize(
    "compression",
    [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA],
)
def test_a_damaged_archive_is_a_model_error_or_harmless(saved, tmp_path, compression):
    path = rewritten(saved, tmp_path / "damaged.keras", compression)
    whole, draw = path.read_bytes(), random.Random(0)
    places = [*range(HEAD), *range(-TAIL, 0)]
    refused = 0

    for _ in range(FUZZED):
        data = bytearray(whole)
        data[draw.choice(places)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(DaskDLError):
            description(path)
            continue
        refused += 1

    assert refused > FUZZED / 4


def test_a_name_that_is_no_text_is_a_model_error(saved, tmp_path):
    path = rewritten(saved, tmp_path / "named.keras", **{"é": b""})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))

    with pytest.raises(ModelError, match="is no file of Keras 3, or damaged: Unicode"):
        description(path)
