"""Fits on bad data, which is named, or left out and counted."""

import threading

import dask
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

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


def fit(data, model=mlp, **options):
    master = daskdl.GradientSharing(replicas_per_worker=2)
    fitted = trainer(False, model=model, master=master)
    options = {"epochs": 2, "batch_size": 8, "on_bad_batch": "skip", **options}
    return fitted.fit(data, **options)


def check_left_out(history, trained, skipped):
    assert history.column("examples") == [trained] * 2
    assert history.column("skipped_examples") == [skipped] * 2


@pytest.fixture
def npz(tmp_path):
    x, y = rows(FILES * EACH)
    for i in range(FILES):
        file_rows = slice(i * EACH, (i + 1) * EACH)
        np.savez(tmp_path / f"{i}.npz", x=x[file_rows], y=y[file_rows])
    return tmp_path


@pytest.fixture
def images(tmp_path):
    names = [f"{'ab'[i % 2]}/{i:02}.png" for i in range(40)]
    pictures.folder(tmp_path, names)
    return tmp_path


in_place_or_exported = pytest.mark.parametrize("approach", ["direct", "export"])


def folder(url):
    return daskdl.data.image_folder(str(url), size=(4, 6), files_per_part=10)


class TestNothingIsLeft:
    @pytest.mark.parametrize("validates", [False, True])
    def test_of_images(self, images, tmp_path_factory, validates):
        place = tmp_path_factory.mktemp("good")
        pictures.folder(place, ["a/1.png", "b/2.png"])
        good, bad = folder(place), folder(images)
        for path in images.glob("*/*.png"):
            path.write_bytes(b"torn")

        options = {"validation": bad} if validates else {}
        message = r"epoch 0.*all 40 .*left out.*cannot read .*png"
        if validates:
            message = r"validation.* all .*left out"
        with pytest.raises(daskdl.DataError, match=message):
            fit(good if validates else bad, Flat, **options)

    def test_of_images_to_export(self, images):
        for path in images.glob("*/*.png"):
            path.write_bytes(b"torn")

        with pytest.raises(daskdl.DataError, match="no rows that can be read"):
            fit(folder(images), Flat, approach="export")


@in_place_or_exported
def test_only_the_bad_image_is_left_out(images, approach):
    (images / "a" / "06.png").write_bytes(b"torn")

    check_left_out(fit(folder(images), Flat, approach=approach), 39, 1)


def one_row(file):
    with PARSING:
        x = np.load(file)
    return x[:-1], int(x[-1])


@pytest.mark.parametrize("bad", ["torn", "wide", "label"])
@pytest.mark.parametrize("place", [0, 20])
@in_place_or_exported
def test_only_the_bad_file_of_one_example_is_left_out(tmp_path, bad, place, approach):
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

    if bad != "label" or place:  # else the dry run finds it
        check_left_out(fit(source, approach=approach), 39, 1)
    with pytest.raises(daskdl.DataError, match=rf"{place:02}\.npy|y\[0\] is 9"):
        fit(source, on_bad_batch="raise", approach=approach)


@in_place_or_exported
def test_an_unreadable_file_of_unknown_length_counts_as_one(npz, approach):
    (npz / "2.npz").write_bytes(b"torn")

    check_left_out(fit(str(npz), approach=approach), 64, 1)


@in_place_or_exported
def test_an_unreadable_delayed_part_counts_as_one(approach):
    def unreadable(number):
        if number == 1:
            raise ValueError("no part 1")
        return rows(16, seed=number)

    parts = [dask.delayed(unreadable)(i) for i in range(3)]
    check_left_out(fit(parts, approach=approach), 32, 1)


@in_place_or_exported
def test_a_file_with_a_label_without_an_output_is_left_out(npz, approach):
    x, y = rows(EACH)
    np.savez(npz / "4.npz", x=x, y=y + 9)

    check_left_out(fit(str(npz), approach=approach), 64, EACH)


def test_a_file_of_another_width_is_named_or_left_out(npz):
    wide = {"x": np.zeros((EACH, 21), np.float32), "y": np.zeros(EACH, int)}
    np.savez(npz / "3.npz", **wide)

    with pytest.raises(daskdl.DataError, match=r"3\.npz.*\(21,\).*\(20,\)"):
        fit(str(npz), on_bad_batch="raise")
    check_left_out(fit(str(npz)), 64, EACH)
    with pytest.raises(daskdl.DataError, match="all rows must have the same names"):
        fit(str(npz), approach="export")


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 2)

    def forward(self, x):
        return self.layer(x.mean(dim=1))


def test_other_shapes_are_fine_if_the_model_accepts_them(tmp_path):
    for i in range(4):
        x = np.ones((8, 3 + i, 20), np.float32)
        np.savez(tmp_path / f"{i}.npz", x=x, y=np.zeros(8, int))

    check_left_out(fit(str(tmp_path), Mean, on_bad_batch="raise"), 32, 0)


def test_a_label_without_an_output_is_named_with_its_file(npz):
    x, y = rows(EACH)
    y[5] = 9
    np.savez(npz / "4.npz", x=x, y=y)

    with pytest.raises(daskdl.DataError, match=r"4\.npz.*\[5\] is 9"):
        fit(str(npz), on_bad_batch="raise")


def test_files_left_out_do_not_change_the_other_steps(npz):
    """As without those files: the same steps, bit for bit."""
    np.savez(npz / "5.npz", x=np.zeros((EACH, 21), np.float32), y=np.zeros(EACH, int))
    good = [str(npz / f"{i}.npz") for i in range(FILES)]
    models = []
    for data in (str(npz), good):
        fitted = trainer(False, optimizer=sgd)
        fitted.fit(data, batch_size=16, on_bad_batch="skip", shuffle=False)
        models.append(fitted.model_.state_dict())

    for name, value in models[0].items():
        assert torch.equal(value, models[1][name])


class Changing:
    """Two parts of 40 rows; from the second time on, part 1 has `later` rows."""

    def __init__(self, later):
        self.later = later
        self.loaded = 0

    def __call__(self, part):
        self.loaded += part
        changed = part == 1 and self.loaded > 1
        return rows(self.later if changed else 40, seed=part)


class WrongCount(Dataset):
    """128 items, of which more or fewer come than are requested together."""

    def __init__(self, later):
        self.more = later - 40

    def __len__(self):
        return 128

    def __getitem__(self, i):
        return np.full(20, i, np.float32), i % 4

    def __getitems__(self, indices):
        items = [self[i] for i in indices]
        return items if len(items) < 4 else [*items, *items][: len(items) + self.more]


def of_files(later, place):
    for part in range(2):
        (place / f"{part}.txt").write_text(str(part))
    changing = Changing(later)
    return daskdl.data.files(place, lambda file: changing(int(file.read())))


def of_delayed(later, place):
    make = dask.delayed(Changing(later), pure=False)
    return [make(part) for part in range(2)]


def of_a_bag(later, place):
    changing = Changing(later)
    examples = dask.delayed(lambda part: list(zip(*changing(part), strict=True)))
    return dask.bag.from_delayed([examples(part) for part in range(2)])


class Promising(daskdl.data.Source):
    """A user's source, of which part 1 never has the rows that it promises."""

    parts, lengths, first_rows = 2, (40, 40), rows(2)

    def __init__(self, later):
        self.later = later

    def load(self, part):
        return rows(self.later if part else 40, seed=part)


def of_a_source(later, place):
    return Promising(later)


def of_items(later, place):
    return WrongCount(later)


def trained_on(X):
    fit(X, on_bad_batch="raise")


def trained_on_an_export(X):
    fit(X, on_bad_batch="raise", approach="export")


def validated_with(X):
    trainer(False).fit(*rows(80), validation=X)


def evaluated(X):
    daskdl.evaluate(mlp(), X, loss=nn.CrossEntropyLoss(), client=False)


@pytest.mark.parametrize("later", [36, 43], ids=["fewer", "more"])
@pytest.mark.parametrize(
    "use", [trained_on, trained_on_an_export, validated_with, evaluated]
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_files, r"1\.txt has \d+ rows, but 40 were counted"),
        (of_delayed, r"part 1 has \d+ rows, but 40 were counted"),
        (of_a_bag, r"part 1 has \d+ rows, but 40 were counted"),
        (of_a_source, r"part 1 has \d+ rows, but 40 were counted"),
        (of_items, r"got \d+ items for 64 indices"),
    ],
)
def test_a_part_that_is_shorter_or_longer_than_counted_is_named(
    make, message, use, later, tmp_path
):
    with pytest.raises(daskdl.DataError, match=message):
        use(make(later, tmp_path))


@pytest.mark.parametrize("later", [36, 43], ids=["fewer", "more"])
@pytest.mark.parametrize("approach", ["direct", "export"])
def test_so_is_a_partition_of_a_dataframe(later, approach):
    changing = Changing(later)

    def frame(part):
        x, y = changing(part)
        return pd.DataFrame(x).add_prefix("x").assign(y=y)

    meta = pd.DataFrame(rows(1)[0]).add_prefix("x").assign(y=0)[:0]
    X = dd.from_delayed([dask.delayed(frame)(part) for part in range(2)], meta=meta)

    with pytest.raises(daskdl.DataError, match=r"part 1.* \d+ .*were counted"):
        fit(X, label="y", on_bad_batch="raise", approach=approach)


class Torn(Dataset):
    """128 items, of which these cannot be used."""

    def __init__(self, bad, how="raises"):
        self.bad, self.how = bad, how
        self.x, self.y = rows(128)

    def __len__(self):
        return 128

    def __getitem__(self, i):
        if i in self.bad and self.how == "raises":
            raise ValueError("torn")
        wide = i in self.bad and self.how == "wide"
        label = 9 if i in self.bad and self.how == "label" else int(self.y[i])
        return self.x[i, : 19 if wide else 20], label


def together(items):
    x, y = zip(*items, strict=True)
    return np.stack(x), np.array(y)


WAYS_TO_GIVE_ITEMS = {
    "a dataset": lambda data: (data, {}),
    "a loader": lambda data: (DataLoader(data, batch_size=8), {"batch_size": None}),
    "a subset": lambda data: (Subset(data, range(128)), {}),
    "joined": lambda data: (ConcatDataset([data]), {}),
    "collated": lambda data: (daskdl.data.dataset(data, collate_fn=together), {}),
}
give = pytest.mark.parametrize(
    "give", WAYS_TO_GIVE_ITEMS.values(), ids=WAYS_TO_GIVE_ITEMS
)


class TestBadItems:
    @give
    @pytest.mark.parametrize("how", ["raises", "wide", "label"])
    @in_place_or_exported
    def test_only_they_are_left_out_and_counted(self, give, how, approach, caplog):
        X, options = give(Torn({70, 99}, how))

        check_left_out(fit(X, approach=approach, **options), 126, 2)

        named = [m for m in caplog.messages if m.startswith("item 70 of the dataset")]
        assert named

    def test_the_first_ones_too(self):
        check_left_out(fit(Torn({0, 1})), 126, 2)

    def test_all_of_them_are_an_error(self):
        with pytest.raises(ValueError, match="torn"):
            fit(Torn({*range(128)}))

    @give
    def test_are_named_if_none_may_be_left_out(self, give):
        X, options = give(Torn({70}))

        with pytest.raises((ValueError, daskdl.RunError), match="torn") as caught:
            fit(X, on_bad_batch="raise", **options)

        notes = getattr(caught.value, "__notes__", ())
        assert "item 70 of the dataset" in "\n".join([str(caught.value), *notes])

    def test_are_left_out_of_validation_and_evaluations(self):
        fitted = trainer(False)
        fitted.fit(*rows(64), validation=Torn({70}), on_bad_batch="skip")
        evaluated = daskdl.evaluate(
            fitted.model_,
            Torn({70}),
            loss=nn.CrossEntropyLoss(),
            on_bad_batch="skip",
            client=False,
        )

        good = Subset(Torn(()), [i for i in range(128) if i != 70])
        loss = nn.CrossEntropyLoss()
        expected = daskdl.evaluate(fitted.model_, good, loss=loss, client=False)
        assert evaluated["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        validated = fitted.history_[-1]["val_loss"]
        assert validated == pytest.approx(expected["loss"], rel=1e-5)

    @pytest.mark.parametrize("method", ["evaluate", "score_examples"])
    def test_are_logged_without_the_good_items_of_their_part(self, method, caplog):
        fitted = trainer(False)
        fitted.fit(*rows(64))

        getattr(fitted, method)(Torn({70}), on_bad_batch="skip")

        logged = [line for line in caplog.messages if "left out" in line]
        assert logged
        assert all(line.startswith("item 70 of the dataset") for line in logged)

    @pytest.mark.parametrize("bad", [0, 70])
    @pytest.mark.parametrize("collate_fn", [None, together])
    def test_have_no_score_and_keep_their_places(self, bad, collate_fn):
        fitted = trainer(False)
        fitted.fit(*rows(64))

        data = daskdl.data.dataset(Torn({bad}), collate_fn=collate_fn)
        scores = fitted.score_examples(data, on_bad_batch="skip")

        expected = fitted.score_examples(Torn(()))
        expected[bad] = np.nan
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("bad", [[0], [1], [7], [20], [*range(10)]], ids=str)
def test_a_torn_file_of_one_example_keeps_its_place(tmp_path, bad):
    x, y = rows(40)
    for i in range(40):
        np.save(tmp_path / f"{i:02}.npy", np.append(x[i], y[i]))
    source = daskdl.data.files(tmp_path, one_row, one_example=True, files_per_part=10)
    fitted = trainer(False)
    fitted.fit(x, y)
    expected = fitted.score_examples(x, y)
    for i in bad:
        (tmp_path / f"{i:02}.npy").write_bytes(b"torn")

    scores = fitted.score_examples(source, on_bad_batch="skip")

    expected[bad] = np.nan
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    check_left_out(fit(source), 40 - len(bad), len(bad))
