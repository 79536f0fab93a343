"""Models are saved as Keras saves them, whole or not at all."""

import numpy as np
import pytest

from daskdl.errors import OptionError
from daskdl.keras.module import KerasModule, library

keras = library()
ROWS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def model():
    return KerasModule(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))


def test_keras_loads_what_was_saved(tmp_path):
    own = model()

    own.save(tmp_path / "own.keras")

    loaded = keras.saving.load_model(tmp_path / "own.keras")
    np.testing.assert_array_equal(
        loaded.predict(ROWS, verbose=0), own.predict(ROWS, verbose=0)
    )


def test_the_file_is_all_that_is_left(tmp_path):
    model().save(str(tmp_path / "own.keras"))
    model().save(str(tmp_path / "own.keras"))

    assert [path.name for path in tmp_path.iterdir()] == ["own.keras"]


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path, own = tmp_path / "own.keras", model()
    path.write_bytes(b"before")

    def full(partial):
        partial.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(own.keras, "save", full)
    with pytest.raises(OSError, match="no space left"):
        own.save(path)

    assert path.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["own.keras"]


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"must end in '.keras', got '.*own.h5'"):
        model().save(tmp_path / "own.h5")
