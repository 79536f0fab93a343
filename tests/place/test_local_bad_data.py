"""Fits on data of which something is bad: named, or left out and counted."""

import threading

import dask
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from tests.support import pictures
from tests.support.problems import mlp, rows, sgd, trainer

# Python 3.11 cannot parse in two threads at once, and numpy.load parses a header.
PARSING = threading.Lock()

FILES, EACH = 5, 16  # npz files, and rows of each


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4 * 6 * 3, 2)

    def forward(self, x):
        return self.layer(x.flatten(1))


def two(model=mlp):
    master = daskdl.GradientSharing(replicas_per_worker=2)
    return trainer(False, model=model, master=master)


def fit(data, model=mlp, **options):
    own = two(model)
    options = {"epochs": 2, "batch_size": 8, "on_bad_batch": "skip", **options}
    return own.fit(data, **options)


@pytest.fixture
def npz(tmp_path):
    x, y = rows(FILES * EACH)
    for i in range(FILES):
        own = slice(i * EACH, (i + 1) * EACH)
        np.savez(tmp_path / f"{i}.npz", x=x[own], y=y[own])
    return tmp_path


@pytest.fixture
def images(tmp_path):
    names = [f"{'ab'[i % 2]}/{i:02}.png" for i in range(40)]
    pictures.folder(tmp_path, names)
    return tmp_path


def folder(url, **options):
    return daskdl.data.image_folder(
        str(url), size=(4, 6), **{"files_per_part": 10, **options}
    )


class TestNothingIsLeft:
    def test_of_images(self, images):
        for path in images.glob("*/*.png"):
            path.write_bytes(b"torn")

        with pytest.raises(
            daskdl.DataError, match=r"epoch 0.*all 40 .*left out.*cannot read .*png"
        ):
            fit(folder(images), Flat)

    def test_of_images_to_validate_with(self, images, tmp_path_factory):
        place = tmp_path_factory.mktemp("good")
        pictures.folder(place, ["a/1.png", "b/2.png"])
        good, bad = folder(place), folder(images)
        for path in images.glob("*/*.png"):
            path.write_bytes(b"torn")

        with pytest.raises(daskdl.DataError, match=r"validation.* all .*left out"):
            fit(good, Flat, validation=bad)

    def test_of_npz(self, npz):
        for path in npz.iterdir():
            path.write_bytes(b"torn")

        with pytest.raises(daskdl.DataError, match="of which 5 cannot be read"):
            fit(str(npz))


def test_one_bad_image_goes_alone(images):
    (images / "a" / "06.png").write_bytes(b"torn")

    history = fit(folder(images), Flat)

    assert history.column("examples") == [39, 39]
    assert history.column("skipped_examples") == [1, 1]


def test_so_does_one_that_is_evaluated(images):
    (images / "a" / "06.png").write_bytes(b"torn")
    own = two(Flat)
    own.model_ = Flat()

    scores = own.evaluate(folder(images), on_bad_batch="skip")

    assert scores["loss"] > 0


def one_row(file):
    with PARSING:
        x = np.load(file)
    return x[:-1], int(x[-1])


@pytest.mark.parametrize("bad", ["torn", "wide", "label"])
@pytest.mark.parametrize("place", [0, 20])
def test_so_does_one_bad_file_of_one_example(tmp_path, bad, place):
    x, y = rows(40)
    for i in range(40):
        np.save(tmp_path / f"{i:02}.npy", np.append(x[i], y[i]))
    path = tmp_path / f"{place:02}.npy"
    if bad == "torn":
        path.write_bytes(b"torn")
    elif bad == "wide":
        np.save(path, np.append(x[0], [0, 0]))
    else:
        np.save(path, np.append(x[0], 9))
    source = daskdl.data.files(tmp_path, one_row, one_example=True, files_per_part=10)

    if bad != "label" or place:  # else the rehearsal of a step finds it
        history = fit(source)
        assert history.column("examples") == [39, 39]
        assert history.column("skipped_examples") == [1, 1]
    with pytest.raises(daskdl.DataError, match=rf"{place:02}\.npy|y\[0\] is 9"):
        fit(source, on_bad_batch="raise")


def test_a_file_that_cannot_be_read_and_whose_length_nobody_knows_counts_as_one(npz):
    (npz / "2.npz").write_bytes(b"torn")

    history = fit(str(npz))

    assert history.column("examples") == [64, 64]
    assert history.column("skipped_examples") == [1, 1]


def test_so_does_such_a_delayed_part():
    def made(number):
        if number == 1:
            raise ValueError("no part 1")
        return rows(16, seed=number)

    history = fit([dask.delayed(made)(i) for i in range(3)])

    assert history.column("examples") == [32, 32]
    assert history.column("skipped_examples") == [1, 1]


class TestAFileOfAnotherWidth:
    @pytest.fixture
    def wide(self, npz):
        np.savez(
            npz / "3.npz", x=np.zeros((EACH, 21), np.float32), y=np.zeros(EACH, int)
        )
        return str(npz)

    def test_is_named(self, wide):
        with pytest.raises(daskdl.DataError, match=r"3\.npz.*\(21,\).*\(20,\)"):
            fit(wide, on_bad_batch="raise")

    def test_is_left_out(self, wide):
        history = fit(wide)

        assert history.column("examples") == [64, 64]
        assert history.column("skipped_examples") == [EACH, EACH]

    def test_is_named_or_left_out_when_it_is_evaluated(self, wide):
        own = two()
        own.model_ = mlp()

        assert own.evaluate(wide, on_bad_batch="skip")["loss"] > 0
        with pytest.raises(daskdl.DataError, match=r"3\.npz"):
            own.evaluate(wide)

    def test_is_fine_if_the_model_takes_it(self, tmp_path):
        for i in range(4):
            x = np.ones((8, 3 + i, 20), np.float32)
            np.savez(tmp_path / f"{i}.npz", x=x, y=np.zeros(8, int))

        class Mean(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(20, 2)

            def forward(self, x):
                return self.layer(x.mean(dim=1))

        history = fit(str(tmp_path), Mean, on_bad_batch="raise")

        assert history.column("examples") == [32, 32]


def test_a_label_that_the_model_has_not_is_named_with_its_file(npz):
    x, y = rows(EACH)
    y[5] = 9
    np.savez(npz / "4.npz", x=x, y=y)

    with pytest.raises(daskdl.DataError, match=r"4\.npz.*\[5\] is 9"):
        fit(str(npz), on_bad_batch="raise")


def test_what_is_left_out_changes_nothing_about_the_rest(npz, tmp_path):
    """As without those files: the same steps, bit for bit."""
    np.savez(npz / "5.npz", x=np.zeros((EACH, 21), np.float32), y=np.zeros(EACH, int))
    one = trainer(False, optimizer=sgd)

    one.fit(str(npz), batch_size=16, on_bad_batch="skip", shuffle=False)
    other = trainer(False, optimizer=sgd)
    other.fit(
        [str(npz / f"{i}.npz") for i in range(FILES)], batch_size=16, shuffle=False
    )

    for name, value in one.model_.state_dict().items():
        assert torch.equal(value, other.model_.state_dict()[name])
