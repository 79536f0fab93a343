"""Columns of tables are matched by name, whatever their order, in every method."""

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import xarray
from dask import delayed
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import daskdl
from daskdl.data import (
    Csv,
    MinMax,
    Normalization,
    Npz,
    Parquet,
    Standardize,
    files,
    pack,
)
from daskdl.data import validate as validate_data
from daskdl.data.inputs import source_of

WEIGHTS = torch.tensor([[1.0, 10.0, 100.0]])
FRAME = pd.DataFrame(
    np.random.default_rng(0).integers(1, 9, (24, 3)).astype(np.float32),
    columns=["a", "b", "c"],
)
Y = FRAME @ WEIGHTS[0].numpy()
OTHER = FRAME[["c", "a", "b"]]
CUTS = (slice(0, 8), slice(8, 16), slice(16, 24))


def sums():
    """The model whose loss is 0 where the columns have their places."""
    layer = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(WEIGHTS)
    return nn.Sequential(layer, nn.Flatten(0))


def trainer(**options):
    # A rate at which the weights do not move.
    return daskdl.Trainer(
        sums, nn.MSELoss(), "sgd", lr=1e-30, client=False, max_loss_rise=None, **options
    )


def trained():
    fitted = trainer()
    fitted.fit(FRAME, Y)
    return fitted


def written(tables, folder, write):
    folder.mkdir()
    for number, (table, y) in enumerate(tables):
        write(table.assign(y=y), folder / f"{number}.part")
    return str(folder / "*.part")


def csv(tables, folder):
    url = written(tables, folder, lambda t, path: t.to_csv(path, index=False))
    return files(url, Csv(label="y", label_dtype="float32")), None, {}


def parquet(tables, folder):
    url = written(tables, folder, lambda t, path: t.to_parquet(path, index=False))
    return files(url, Parquet(label="y")), None, {}


def delayed_parts(tables, folder):
    return [delayed(lambda *pair: pair)(*pair) for pair in tables], None, {}


def unlike_meta(tables, folder):
    """Partitions whose columns are in another order than Dask says."""
    xs, ys = zip(*tables, strict=True)
    names = sorted(xs[0])  # such as a, b, c
    metas = pd.DataFrame(columns=names, dtype="float32"), Y
    x, y = (
        dd.from_delayed([delayed(part) for part in parts], meta=meta, verify_meta=False)
        for parts, meta in zip((xs, ys), metas, strict=True)
    )
    return x, y, {}


PARTS = {
    "csv": csv,
    "parquet": parquet,
    "delayed": delayed_parts,
    "dask": unlike_meta,
}


def whole(make):
    def make_whole(tables, folder):
        xs, ys = zip(*tables, strict=True)
        return *make(pd.concat(xs)[xs[0].columns], pd.concat(ys), folder), {}

    return make_whole


def labelled(frame):
    names = list(frame.columns)
    return xarray.DataArray(frame.to_numpy(), {"column": names}, ["row", "column"])


def exported(x, y, folder):
    pack(x, y, url=folder, per_file=5, client=False)
    return str(folder), None


KINDS = {
    "pandas": whole(lambda x, y, _: (x, y)),
    "pyarrow": whole(lambda x, y, _: (pa.table(x), y)),
    "xarray": whole(lambda x, y, _: (labelled(x), y.to_numpy())),
    "lazy xarray": whole(
        lambda x, y, _: (labelled(x).chunk(row=8), da.from_array(y.to_numpy(), 8))
    ),
    "export": whole(exported),
    **PARTS,
}


def data_of(kind, tables, folder):
    return KINDS[kind](tables, folder / kind)


def in_parts(table):
    return [(table[cut], Y[cut]) for cut in CUTS]


def evaluated(fitted, X, y, options):
    return fitted.evaluate(X, y, **options)["loss"]


def validated(fitted, X, y, options):
    validation = X if y is None else (X, y)
    return fitted.fit(FRAME, Y, validation=validation)[-1]["val_loss"]


def fitted_again(fitted, X, y, options):
    return fitted.fit(X, y, **options)[-1]["loss"]


def joined(outputs):
    """Outputs of any kind as one array."""
    if isinstance(outputs, db.Bag):
        return np.asarray(outputs.compute(scheduler="sync"))
    lazy = isinstance(outputs, list)
    return np.concatenate(dask.compute(*outputs)) if lazy else np.asarray(outputs)


def scored(fitted, X, y, options):
    scores = fitted.score_examples(X, y, **options)
    return np.max(joined(scores))


def predicted(fitted, X, y, options):
    outputs = joined(fitted.predict(X, **options))
    return np.abs(np.sort(outputs) - np.sort(Y)).max()  # an export shuffles its rows


def loaded(fitted, X, y, options):
    fitted.save("memory://named-columns")
    again = daskdl.Trainer.load("memory://named-columns", model=sums, client=False)
    return evaluated(again, X, y, options)


METHODS = [evaluated, validated, fitted_again, scored, predicted, loaded]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
class TestAfterAFit:
    def test_columns_in_another_order_are_those_of_their_names(
        self, kind, method, tmp_path
    ):
        X, y, options = data_of(kind, in_parts(OTHER), tmp_path)

        assert method(trained(), X, y, options) < 1e-3

    def test_other_columns_are_refused_by_name(self, kind, method, tmp_path):
        renamed = OTHER.rename(columns={"a": "z"})
        X, y, options = data_of(kind, in_parts(renamed), tmp_path)

        with pytest.raises(
            daskdl.DataError,
            match=r"X.* must have the same columns as the data before it, 'a', 'b', "
            r"'c'; missing: 'a'; unexpected: 'z'",
        ):
            method(trained(), X, y, options)


def unlike_parts():
    return [(FRAME[CUTS[0]], Y[CUTS[0]]), *in_parts(OTHER)[1:]]


@pytest.mark.parametrize("kind", PARTS)
class TestPartsThatDiffer:
    def test_are_trained_on_by_name(self, kind, tmp_path):
        X, y, options = data_of(kind, unlike_parts(), tmp_path)
        fitted = trainer()

        assert fitted.fit(X, y, **options)[-1]["loss"] < 1e-3
        assert fitted.feature_names_in_ == ("a", "b", "c")

    def test_are_exported_by_name(self, kind, tmp_path):
        X, y, options = data_of(kind, unlike_parts(), tmp_path)
        if options:
            X = daskdl.data.files(X, options["loader"])

        pack(X, y, url=tmp_path / "packed", per_file=4, client=False)

        assert trainer().fit(str(tmp_path / "packed"))[-1]["loss"] < 1e-3
        assert trained().evaluate(str(tmp_path / "packed"))["loss"] < 1e-3

    def test_are_normalized_by_name(self, kind, tmp_path):
        X, y, options = data_of(kind, unlike_parts(), tmp_path)

        fitted = MinMax().fit(X, y, client=False, **options)

        assert fitted.scalings.shift.tolist() == FRAME.min().tolist()
        assert fitted.columns == {"X": ("a", "b", "c")}

    def test_are_predicted_by_name_without_a_trainer(self, kind, tmp_path):
        X, _, options = data_of(kind, unlike_parts(), tmp_path)

        outputs = daskdl.predict(sums(), X, client=False, **options)

        np.testing.assert_allclose(joined(outputs), Y, rtol=1e-6)

    def test_are_refused_if_a_column_is_missing(self, kind, tmp_path):
        tables = unlike_parts()
        tables[1] = tables[1][0].rename(columns={"c": "d"}), tables[1][1]
        X, y, options = data_of(kind, tables, tmp_path)

        message = r"X of .*1.*missing: 'c'; unexpected: 'd'; rename"
        with pytest.raises(daskdl.DataError, match=message):
            trainer().fit(X, y, **options)
        report = validate_data(X, y, client=False)
        assert report.counts["unreadable"] == 1


@pytest.mark.parametrize(
    "tree",
    [lambda x, z: {"left": x, "right": z}, lambda x, z: (x, z)],
    ids=["dict", "tuple"],
)
def test_each_table_of_several_inputs_has_its_columns(tree):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.sums = sums()

        def forward(self, left, right):
            return self.sums(left) - self.sums(right)

    fitted = daskdl.Trainer(Both, nn.MSELoss(), "sgd", lr=1e-30, client=False)
    zeros = np.zeros(len(Y), np.float32)
    fitted.fit(tree(FRAME, OTHER[["a", "b", "c"]]), zeros)

    assert fitted.evaluate(tree(OTHER, FRAME[["b", "c", "a"]]), zeros)["loss"] < 1e-3
    assert [*fitted.feature_names_in_.values()] == [("a", "b", "c")] * 2


def test_a_column_may_have_the_name_of_an_attribute_of_tables():
    table = pd.DataFrame({"schema": [1.0, 2.0], "ndim": [3.0, 4.0]})

    source = source_of(table)

    assert source.columns == {"X": ("schema", "ndim")}
    assert source.load(0)[0].tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_columns_of_labels_are_matched_by_name():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale

    fitted = daskdl.Trainer(Same, nn.MSELoss(), "sgd", lr=1e-30, client=False)
    fitted.fit(FRAME.to_numpy(), FRAME)

    assert fitted.evaluate(FRAME.to_numpy(), OTHER)["loss"] == 0
    with pytest.raises(daskdl.DataError, match=r"y must have .* unexpected: 'z'"):
        fitted.evaluate(FRAME.to_numpy(), OTHER.rename(columns={"a": "z"}))


def test_the_names_of_most_parts_are_those_that_count():
    parts, _, _ = delayed_parts(in_parts(OTHER), None)
    renamed = FRAME.rename(columns={"a": "z"})
    parts = [delayed((renamed[CUTS[0]], Y[CUTS[0]])), *parts]
    fitted = trainer()

    history = fitted.fit(parts, on_bad_batch="skip")

    assert fitted.feature_names_in_ == ("c", "a", "b")
    assert history[-1]["examples"] == 24


def test_a_normalized_export_keeps_the_names(tmp_path):
    fitted = Standardize().fit(FRAME, client=False)
    url = str(tmp_path / "packed")
    pack(FRAME, Y, url=url, per_file=8, transform=fitted, client=False)
    trained = trainer()
    trained.fit(url)

    assert trained.feature_names_in_ == ("a", "b", "c")
    plain = trained.evaluate(FRAME, Y, transform=fitted)
    assert trained.evaluate(url) == pytest.approx(plain)
    assert trained.evaluate(OTHER, Y, transform=fitted) == plain


def test_an_export_of_a_function_of_the_rows_has_no_names(tmp_path):
    url = tmp_path / "packed"
    pack(FRAME, Y, url=url, per_file=8, transform=lambda rows: rows, client=False)

    assert daskdl.data.files(url).columns == {}


@pytest.mark.parametrize("method", ["evaluate", "score_examples", "fit"])
@pytest.mark.parametrize("kind", ["bag", "list"])
def test_series_as_examples_are_refused(kind, method):
    rows = [(row, y) for (_, row), y in zip(OTHER.iterrows(), Y, strict=True)]
    data = rows if kind == "list" else db.from_sequence(rows, npartitions=2)

    with pytest.raises(daskdl.DataError, match=r"got a table or a series, .*to_numpy"):
        joined(getattr(trained(), method)(data))


class Unnamed(Dataset):
    """Rows of arrays, as a map-style dataset."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class UnnamedStream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x, self.y, strict=True)


def npz(x, y, folder):
    folder.mkdir()
    np.savez(folder / "0.npz", x=x, y=y)
    return files(folder / "*.npz", Npz("x", "y")), None, {}


def csv_by_index(x, y, folder):
    table = pd.DataFrame(x, columns=["p", "q", "r"])
    url = written([(table, y)], folder, lambda t, path: t.to_csv(path, index=False))
    reader = Csv(features=[0, 1, 2], label="y", label_dtype="float32")
    return files(url, reader), None, {}


# Data whose columns have no names, in the order of the training data.
UNNAMED = {
    "numpy": lambda x, y, _: (x, y, {}),
    "torch": lambda x, y, _: (torch.tensor(x), torch.tensor(y), {}),
    "dask.array": lambda x, y, _: (
        da.from_array(x, chunks=(8, 3)),
        da.from_array(y, chunks=8),
        {},
    ),
    "delayed": lambda x, y, _: ([delayed((x, y))], None, {}),
    "bag": lambda x, y, _: (db.from_sequence(zip(x, y, strict=True)), None, {}),
    "dataset": lambda x, y, _: (Unnamed(x.copy(), y.copy()), None, {}),
    "stream": lambda x, y, _: (UnnamedStream(x.copy(), y.copy()), None, {}),
    "export": lambda x, y, folder: (*exported(x, y, folder), {}),
    "npz": npz,
    "csv by index": csv_by_index,
}
UNNAMED_METHODS = [evaluated, validated, fitted_again, predicted, scored]


@pytest.mark.parametrize("method", UNNAMED_METHODS)
@pytest.mark.parametrize("kind", UNNAMED)
def test_data_without_names_after_a_table_are_taken_by_position_with_a_warning(
    kind, method, tmp_path
):
    X, y, options = UNNAMED[kind](FRAME.to_numpy(), Y.to_numpy(), tmp_path / "data")
    fitted = trained()

    with pytest.warns(UserWarning, match="X.* has no column names, .* 'a', 'b'"):
        assert method(fitted, X, y, options) < 1e-3


@pytest.mark.parametrize("method", [evaluated, validated, fitted_again, scored])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_after_an_array_are_taken_by_position_with_a_warning(
    kind, method, tmp_path
):
    X, y, options = data_of(kind, in_parts(FRAME), tmp_path)
    fitted = trainer()
    fitted.fit(FRAME.to_numpy(), Y)

    with pytest.warns(UserWarning, match="X.* has the column names 'a', 'b', 'c'"):
        method(fitted, X, y, options)


def test_validation_without_names_beside_parts_with_names_is_warned_about():
    parts, _, _ = delayed_parts(in_parts(FRAME), None)

    with pytest.warns(UserWarning, match="X has no column names"):
        trainer().fit(parts, validation=(FRAME.to_numpy(), Y))


def test_a_part_without_names_beside_parts_with_names_is_warned_about():
    parts, _, _ = delayed_parts(in_parts(FRAME), None)
    parts[1] = delayed((FRAME[CUTS[1]].to_numpy(), Y[CUTS[1]]))

    with pytest.warns(UserWarning, match="X of part 1 has no column names"):
        trainer().fit(parts)


def test_a_predictor_warns_of_columns_that_it_takes_by_position():
    fitted = trainer()
    fitted.fit(FRAME.to_numpy(), Y)

    with trained().predictor() as predictor:
        with pytest.warns(UserWarning, match="X has no column names, .* 'a', 'b'"):
            outputs = predictor(FRAME.to_numpy())
        np.testing.assert_allclose(outputs, Y, rtol=1e-6)
    with fitted.predictor() as predictor:
        with pytest.warns(UserWarning, match="X has the column names 'c', 'a', 'b'"):
            predictor(OTHER)
        predictor(FRAME.to_numpy())


class TestArraysAndTables:
    def test_a_table_after_an_array_is_taken_by_position_with_a_warning(self):
        fitted = trainer()
        fitted.fit(FRAME.to_numpy(), Y)

        with pytest.warns(UserWarning, match="X has the column names 'c', 'a', 'b'"):
            assert fitted.evaluate(OTHER, Y)["loss"] > 1
        assert fitted.feature_names_in_ is None

    def test_an_array_of_another_width_is_refused(self):
        with pytest.raises(daskdl.DataError, match="must have 3 columns, 'a', 'b', "):
            trained().evaluate(FRAME.to_numpy()[:, :2], Y)

    def test_names_are_forgotten_after_a_reset(self):
        fitted = trained()
        fitted.reset()

        fitted.fit(OTHER.rename(columns=str.upper), Y)

        assert fitted.feature_names_in_ == ("C", "A", "B")

    def test_names_that_are_numbers_are_matched_too(self):
        fitted = trainer()
        fitted.fit(pd.DataFrame(FRAME.to_numpy()), Y)

        table = pd.DataFrame(FRAME.to_numpy())[[2, 0, 1]]
        assert fitted.evaluate(table, Y)["loss"] < 1e-3

    def test_columns_of_one_name_are_taken_in_the_same_order_only(self):
        twice = FRAME.set_axis(["a", "b", "a"], axis=1)
        fitted = trainer()
        fitted.fit(twice, Y)

        assert fitted.evaluate(twice, Y)["loss"] < 1e-3
        with pytest.raises(daskdl.DataError, match="give each column its own name"):
            fitted.evaluate(twice.iloc[:, [0, 2, 1]], Y)

    def test_the_column_of_the_labels_is_named_if_it_is_left_in(self):
        with pytest.raises(daskdl.DataError, match=r"unexpected: 'y'; .*label='y'"):
            trained().predict(OTHER.assign(y=Y))


class TestNormalizers:
    def test_a_trainer_takes_the_order_of_its_normalizer(self):
        fitted = Standardize().fit(OTHER, client=False)
        reordered, plain = trainer(transform=fitted), trainer(transform=fitted)

        reordered.fit(FRAME, Y)
        plain.fit(OTHER, Y)

        assert reordered.feature_names_in_ == ("c", "a", "b")
        assert reordered.evaluate(FRAME, Y) == plain.evaluate(OTHER, Y)

    def test_it_is_refused_in_another_order_than_that_of_the_model(self):
        fitted = Standardize().fit(OTHER, client=False)

        with pytest.raises(daskdl.DataError, match="fit it again"):
            trained().evaluate(FRAME, Y, transform=fitted)

    def test_it_keeps_its_columns_as_plain_values(self):
        fitted = Standardize().fit(OTHER, client=False)

        again = Normalization.from_dict(fitted.to_dict())

        assert again == fitted
        assert again.columns == {"X": ("c", "a", "b")}


def test_a_predictor_matches_the_columns_of_tables():
    with trained().predictor() as predictor:
        outputs = predictor(OTHER)
        with pytest.raises(daskdl.DataError, match="missing: 'a'"):
            predictor(OTHER.drop(columns="a"))

    np.testing.assert_allclose(outputs, Y, rtol=1e-6)


def test_a_resumed_fit_matches_the_columns_of_its_checkpoint(tmp_path):
    callbacks = [daskdl.Checkpoint(str(tmp_path))]
    trainer(callbacks=callbacks).fit(FRAME, Y, epochs=1)
    fitted = trainer()

    history = fitted.fit(OTHER, Y, epochs=2, resume=str(tmp_path))

    assert history[-1]["loss"] < 1e-3
    assert fitted.feature_names_in_ == ("a", "b", "c")


class TestClassesOfParts:
    NAMES = np.array(["no", "yes"])[(FRAME["a"] > 4).astype(int)]

    def parts(self, *dtypes):
        labels = pd.Series(self.NAMES)
        columns = [labels[cut].astype(d) for cut, d in zip(CUTS, dtypes, strict=True)]
        return [
            delayed(lambda *pair: pair)(FRAME[cut], column)
            for cut, column in zip(CUTS, columns, strict=True)
        ]

    def classifier(self):
        model = nn.Linear(3, 2)
        return daskdl.Trainer(model, "cross_entropy", "sgd", lr=0.01, client=False)

    def test_one_dtype_for_all_parts_numbers_the_labels(self):
        classifier = self.classifier()
        shared = pd.CategoricalDtype(["yes", "no"])

        classifier.fit(self.parts(shared, shared, shared))

        assert classifier.classes_ == ("yes", "no")
        table = FRAME.assign(y=pd.Series(self.NAMES).astype(shared))
        ours = classifier.evaluate(self.parts(shared, shared, shared))
        assert ours == pytest.approx(classifier.evaluate(table, label="y"))
        scores = joined(classifier.score_examples(self.parts(shared, shared, shared)))
        np.testing.assert_allclose(
            scores, classifier.score_examples(table, label="y"), rtol=1e-5
        )

    def test_other_categories_in_a_part_are_refused(self):
        shared = pd.CategoricalDtype(["yes", "no"])
        parts = self.parts(shared, pd.CategoricalDtype(["no", "yes"]), shared)
        classifier = self.classifier()

        message = (
            r"y of part 1 .*'no', 'yes', .* before it 'yes', 'no'; .*CategoricalDt"
        )
        with pytest.raises(daskdl.DataError, match=message):
            classifier.fit(parts)

    @pytest.mark.parametrize("method", ["evaluate", "score_examples", "fit"])
    def test_later_parts_must_have_the_same_categories(self, method):
        shared, swapped = map(pd.CategoricalDtype, (["yes", "no"], ["no", "yes"]))
        classifier = self.classifier()
        classifier.fit(self.parts(shared, shared, shared))

        with pytest.raises(daskdl.DataError, match=r"'no', 'yes', .*CategoricalDtype"):
            joined(getattr(classifier, method)(self.parts(swapped, swapped, swapped)))

    @pytest.mark.parametrize("numbered", [0, 2], ids=["first part", "last part"])
    @pytest.mark.parametrize("on_bad_batch", ["raise", "skip"])
    def test_numbers_beside_categories_are_refused(self, numbered, on_bad_batch):
        parts = self.parts(*[pd.CategoricalDtype(["yes", "no"])] * 3)
        cut = CUTS[numbered]
        parts[numbered] = delayed((FRAME[cut], pd.Series([0, 1] * 4)))

        with pytest.raises(daskdl.DataError, match=r"has the categories .*none"):
            self.classifier().fit(parts, on_bad_batch=on_bad_batch)

    def test_text_in_parts_is_told_to_become_categories(self):
        message = r"y of part 0 holds .*strings.*: y.astype\(pandas.CategoricalDtype\("
        with pytest.raises(daskdl.DataError, match=message):
            self.classifier().fit(self.parts(str, str, str))

    @pytest.mark.parametrize(
        "known",
        [
            lambda table: table.assign(y=table["y"].astype("category").cat.as_known()),
            lambda table: table.astype({"y": "category"}).categorize(["y"]),
        ],
        ids=["as_known", "categorize"],
    )
    def test_known_categories_of_a_dask_frame_are_a_label(self, known):
        classifier = self.classifier()
        table = dd.from_pandas(FRAME.assign(y=self.NAMES), npartitions=3)

        classifier.fit(known(table), label="y")

        assert classifier.classes_ == ("no", "yes")
