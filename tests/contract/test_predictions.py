"""What predict returns for each kind of data, in this process."""

import datetime
import re
import uuid
from collections import UserDict, namedtuple
from types import SimpleNamespace

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import daskdl
from daskdl.data import files, image_folder, pack
from daskdl.errors import DataError, ModelError, OptionError
from tests.support.pictures import folder

X = np.arange(14.0, dtype=np.float32).reshape(7, 2)
SUMS = X.sum(axis=1).tolist()
TABLE = pd.DataFrame(X, columns=["a", "b"], index=pd.Index(list("tuvwxyz"), name="who"))
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
ID = uuid.UUID(int=7)


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(dim=1)


class Both(nn.Module):
    def forward(self, x):
        return {"sum": x.sum(dim=1), "parts": (2 * x, x[:, :1].to(torch.int32))}


class OfTwo(nn.Module):
    def forward(self, x):
        return x["one"] + x["other"][0]


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="sync"):
        yield


def predict(model, data, **options):
    options = {"batch_size": 2, "client": False} | options
    return daskdl.predict(model, data, **options)


def lazy(values=X, rows=3):
    return da.from_array(values, chunks=(rows, *values.shape[1:]))


def table(partitions=3):
    return dd.from_pandas(TABLE, npartitions=partitions)


def bag_of(examples, partitions=2):
    return dask.bag.from_sequence(examples, npartitions=partitions)


def listed(tree):
    """Arrays as lists, in any nesting."""
    if isinstance(tree, dict):
        return {key: listed(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [listed(value) for value in tree]
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree


BAG = [((i, b"k"), np.full(1 + i % 2, i, np.float32)) for i in range(5)]
EXAMPLES = [
    {"sum": 21.0, "parts": [[20.0, 22.0], [10]]},
    {"sum": 25.0, "parts": [[24.0, 26.0], [12]]},
]
# Data, a model, the chunks or the number of partitions, and the outputs.
KINDS = {
    "an array": (lazy(rows=(3, 0, 4)), nn.Identity(), ((3, 0, 4), (2,)), X.tolist()),
    "several outputs of unknown lengths": (
        lazy().map_blocks(lambda block: block, chunks=((np.nan,) * 3, (2,))),
        *(Both(), None),
        {"sum": SUMS, "parts": [(2 * X).tolist(), X[:, :1].astype(int).tolist()]},
    ),
    "several inputs, cut in different ways": (
        {"one": lazy(), "other": (lazy(X * 10, rows=2),)},
        *(OfTwo(), ((3, 3, 1), (2,)), (X * 11).tolist()),
    ),
    "rows in memory": (X, nn.Identity(), None, X.tolist()),
    "a bag with keys and shapes": (bag_of(BAG), nn.Identity(), 2, listed(BAG)),
    "a bag with empty partitions and several outputs": (
        bag_of(list(X), 3).filter(lambda row: row[0] > 9),
        *(Both(), 3, EXAMPLES),
    ),
    "a list of rows and of examples": (
        [
            dask.delayed((X[:0], None), traverse=False),
            dask.delayed(X[:4]),
            dask.delayed(list(X[4:]), traverse=False),
        ],
        *(nn.Identity(), None, [[], X[:4].tolist(), X[4:].tolist()]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_like_the_data(kind):
    data, model, parts, expected = KINDS[kind]

    outputs = predict(model, data)

    assert listed(*dask.compute(outputs)) == expected
    if isinstance(parts, tuple):
        assert outputs.chunks == parts
        assert outputs.dtype == np.float32
        assert listed(outputs.compute(scheduler="threads")) == expected
    if isinstance(parts, int):
        assert isinstance(outputs, dask.bag.Bag)
        assert outputs.npartitions == parts


class TestInMemory:
    @pytest.mark.parametrize("batch_size", [1, 3, 100])
    def test_numpy_gets_numpy_and_neither_model_nor_rows_are_changed(self, batch_size):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.ReLU(inplace=True), nn.Linear(2, 4), nn.BatchNorm1d(4)),
            *(nn.Dropout(0.5), nn.Linear(4, 3)),
        ).train()
        before, x = {n: v.clone() for n, v in model.state_dict().items()}, X - 7
        outputs = predict(model, x, batch_size=batch_size)

        assert type(outputs) is np.ndarray
        assert outputs.dtype == np.float32
        np.testing.assert_array_equal(x, X - 7)
        assert model.training
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
        with torch.no_grad():
            expected = model.eval()(torch.tensor(x)).numpy()
        # Batches of another size may use another matrix kernel, which rounds otherwise.
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)

    def test_outputs_have_the_dtype_of_the_model_but_for_numpy_without_bfloat16(self):
        model = nn.Linear(2, 3).bfloat16()

        outputs = predict(model, torch.from_numpy(X))

        assert outputs.dtype == torch.bfloat16
        assert not outputs.requires_grad
        assert predict(model, lazy()).dtype == np.float32
        assert predict(model, lazy()).compute().dtype == np.float32
        assert predict(nn.Identity(), np.arange(6).reshape(3, 2)).dtype == np.int64

    @pytest.mark.parametrize(
        ("model", "data", "options", "error", "message"),
        [
            (nn.Linear, X, {}, ModelError, "model must be a torch.nn.Module"),
            (nn.Linear(3, 2), X, {}, ModelError, r"failed on 2 rows of X, shape \(2, "),
            (nn.Flatten(0), X, {}, ModelError, r"one row per .* \(4,\) for two rows"),
            (nn.LSTM(2, 2), X, {}, ModelError, r"got \(1, 2\) for two rows"),
            (Sum(), X[:0], {}, DataError, "X must not be empty"),
            (Sum(), da.zeros((4, 4), chunks=2), {}, DataError, r"X.rechunk\({1: -1}\)"),
            (Sum(), X, {"postprocess": 3}, OptionError, "postprocess must be a func"),
            (
                Sum(),
                X,
                {"keyed": True},
                OptionError,
                r"keyed=True applies .* a ndarray",
            ),
            (Sum(), X, {"keyed": 7}, OptionError, "keyed must be True, .* got 7"),
        ],
        ids=[
            *("class", "shape", "one long row", "state"),
            *("empty", "chunks", "postprocess", "keys", "keyed"),
        ],
    )
    def test_unusable_arguments_are_refused(self, model, data, options, error, message):
        with pytest.raises(error, match=message):
            predict(model, data, **options)

    def test_outputs_that_change_their_shape_are_refused(self):
        class Growing(nn.Module):
            def forward(self, x):
                return x[:, : 1 + int(x.max() > 9)]

        for data in (X, lazy()):
            with pytest.raises(ModelError, match=r"\(\d, 2\) for \d rows, but"):
                np.asarray(predict(Growing(), data))


def test_outputs_are_lazy_and_several_are_computed_in_one_pass():
    rows_seen = []

    def note(block):
        rows_seen.append(len(block))
        return block

    data = lazy().map_blocks(note, dtype=X.dtype, meta=X[:0])
    outputs = predict(Both(), data)
    assert rows_seen == []
    assert outputs["sum"][6:].compute().tolist() == SUMS[6:]
    assert rows_seen == [1]

    dask.compute(outputs)

    assert sorted(rows_seen) == [1, 1, 3, 3]


class TestTables:
    def test_outputs_are_series_and_frames_with_the_same_index(self):
        outputs = predict(Both(), table())

        assert isinstance(outputs["sum"], dd.Series)
        assert outputs["sum"].divisions == table().divisions
        sums = dict(zip("tuvwxyz", SUMS, strict=True))
        assert outputs["sum"].compute().to_dict() == sums
        twice = outputs["parts"][0]
        assert isinstance(twice, dd.DataFrame)
        assert list(twice.columns) == [0, 1]
        assert list(twice.compute().index) == list(TABLE.index)
        assert twice.compute().to_numpy().tolist() == (2 * X).tolist()
        few = table()[table()["a"] > 11]  # partitions without rows
        assert predict(Sum(), few).compute().to_dict() == {"z": 25.0}

    @pytest.mark.parametrize(
        ("classes", "columns"),
        [(("cat", "dog"), ["cat", "dog"]), (("a", "b", "c"), [0, 1]), (None, [0, 1])],
        ids=["as many", "more", "none"],
    )
    def test_columns_are_named_by_as_many_classes(self, classes, columns):
        trainer = daskdl.Trainer(
            nn.Identity, nn.MSELoss(), torch.optim.Adam, client=False
        )
        trainer.model_, trainer.classes_ = nn.Identity(), classes

        outputs = trainer.predict(table())

        assert list(outputs.columns) == list(outputs.compute().columns) == columns
        assert outputs.compute().to_numpy().tolist() == X.tolist()

    def test_outputs_with_more_than_two_dimensions_are_refused(self):
        with pytest.raises(ModelError, match=r"shape \(1, 2\) for each row, which doe"):
            predict(nn.Unflatten(1, (1, 2)), table())


SHAPES = []  # of batches


def mean(x):
    SHAPES.append(tuple(x.shape))
    return x.mean(dim=1)


class TestExamples:
    def test_each_batch_has_one_shape_and_outputs_the_order_of_the_examples(self):
        lengths = [3, 5, 3, 4, 5, 3, 3, 5]
        bag = bag_of([np.full(n, float(i)) for i, n in enumerate(lengths)], 1)
        outputs = predict(nn.Identity(), bag, postprocess=mean)
        SHAPES.clear()

        assert outputs.compute() == list(range(8))
        assert SHAPES == [(2, 3), (2, 3), (2, 5), (1, 5), (1, 4)]

    def test_predict_computes_only_the_first_part_of_a_bag(self):
        computed = []

        def note(example):
            computed.append(example)
            return np.full(2, float(example))

        predict(Sum(), bag_of(list(range(6)), 3).map(note))

        assert computed == [0, 1]

    def test_empty_partitions_stay_empty_but_one_must_have_examples(self):
        bag = bag_of([(i, np.full(2, i, np.float32)) for i in range(6)], 3)

        outputs = predict(Sum(), bag.filter(lambda pair: pair[0] > 3))

        assert outputs.npartitions == 3
        assert outputs.compute() == [(4, 8.0), (5, 10.0)]
        with pytest.raises(DataError, match="must not be empty, got no rows in 3 part"):
            predict(Sum(), bag.filter(lambda pair: False))


ZEROS = np.zeros(2)
KEYED = [
    ("cat", 1.5),
    *((key, ZEROS) for key in ("cat", b"cat", ID, NOW, NOW.date(), ("a", (1,)))),
    *((key, ZEROS) for key in (np.datetime64("2026-01-02"), 3, np.int64(3), (1, 2))),
    (3, (ZEROS, 1)),
]
NOT_KEYED = [ZEROS, (ZEROS, 1), (ZEROS, np.zeros(1)), (3, 1), (1.5, 2)]


class TestKeys:
    @pytest.mark.parametrize("example", [*KEYED, *NOT_KEYED], ids=repr)
    def test_the_first_example_tells_whether_there_are_keys(self, example):
        (output,) = predict(nn.Identity(), bag_of([example], 1))

        key, x = (
            example if any(example is keyed for keyed in KEYED) else (None, example)
        )
        if key is not None:
            output_key, output = output
            assert (output_key, type(output_key)) == (key, type(key))
        assert np.array_equal(output, x[0] if isinstance(x, tuple) else x)

    @pytest.mark.parametrize(
        ("keyed", "expected"),
        [(None, [7, 8]), (True, [(7, 1), (8, 2)]), (False, [7, 8])],
        ids=str,
    )
    def test_keyed_decides_where_the_first_example_does_not(self, keyed, expected):
        bag = bag_of([(7, 1), (8, 2)])

        assert predict(nn.Identity(), bag, keyed=keyed).compute() == expected

    def test_an_example_without_a_key_among_others_is_refused(self):
        bag = bag_of([*((key, X[0]) for key in "abc"), X[0]])

        with pytest.raises(DataError, match="example 1 of part 1 must be a pair"):
            predict(nn.Identity(), bag).compute()


def row_files(folder):
    """Files with 3, 3 and 1 rows; return the pairs (key, x) of all rows."""
    pairs = []
    for number, rows in enumerate((X[:3], X[3:6], X[6:])):
        path = folder / f"{number}.npy"
        np.save(path, rows)
        pairs += [((str(path), row), x) for row, x in enumerate(rows)]
    return pairs


class TestFiles:
    def test_outputs_of_paths_are_an_array_and_with_keys_a_lazy_bag(self, tmp_path):
        pairs = row_files(tmp_path)
        calls = []

        def noted(outputs):
            calls.append(len(outputs))
            return outputs

        outputs = predict(Sum(), f"{tmp_path}/*.npy")
        bag = predict(Sum(), f"{tmp_path}/*.npy", keyed=True, postprocess=noted)

        assert outputs.tolist() == SUMS
        assert isinstance(bag, dask.bag.Bag)
        assert bag.npartitions == 3
        assert calls == [2]  # the dry run
        assert bag.compute() == [(key, x.sum()) for key, x in pairs]

    @pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
    def test_keys_are_the_url_and_the_row_of_a_file(self, packed, tmp_path):
        (tmp_path / "rows").mkdir()
        pairs, url = row_files(tmp_path / "rows"), f"{tmp_path}/rows"
        if packed:
            target = f"{tmp_path}/packed"
            pack(url, url=target, per_file=2, client=False)
            url = target

        bag = predict(Both(), files(url), keyed=True).compute()

        outputs = {(url[-5:], row): y for (url, row), y in bag}
        assert len(bag) == len(pairs)
        for (url, row), x in pairs:
            output = outputs[url[-5:], row]
            assert output["sum"] == x.sum()
            np.testing.assert_array_equal(output["parts"][0], 2 * x)

    def test_the_key_of_an_image_is_its_url(self, tmp_path):
        folder(tmp_path, [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in "012"])
        images = image_folder(tmp_path, seed=1, files_per_part=4)

        bag = predict(nn.Flatten(), images, keyed=True)
        pairs = bag.compute()

        assert bag.npartitions == 2
        assert [url for url, _ in pairs] == [
            f"{tmp_path}/{path}" for path in images.paths
        ]
        np.testing.assert_array_equal(
            [output for _, output in pairs], predict(nn.Flatten(), images)
        )


MEMORY_AND_DASK = pytest.mark.parametrize("data", [X, lazy()], ids=["numpy", "dask"])


def failing(outputs):
    if outputs.shape[0] == 2 and outputs.max() > 8:
        raise ZeroDivisionError("mine")
    return outputs


class TestPostprocess:
    @MEMORY_AND_DASK
    def test_it_follows_the_transform_and_has_no_gradients(self, data):
        def transform(batch):
            assert batch[1] is None
            return 2 * batch[0], None

        def postprocess(outputs):
            assert not outputs.requires_grad
            return outputs + 1

        model = nn.Linear(2, 2)
        nn.init.eye_(model.weight), nn.init.zeros_(model.bias)

        predicted = predict(model, data, transform=transform, postprocess=postprocess)

        assert np.asarray(predicted).tolist() == (2 * X + 1).tolist()

    @MEMORY_AND_DASK
    def test_its_errors_name_the_part(self, data):
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            np.asarray(predict(nn.Identity(), data, postprocess=failing))

        assert caught.value.__notes__[0] == "in postprocess"
        assert caught.value.__notes__[1].startswith("in part ")
        assert "failing" in [frame.name for frame in caught.traceback]

    @pytest.mark.parametrize(
        ("postprocess", "message"),
        [
            (lambda x: x["y"], r"failed on the outputs of two rows, shape \(2,"),
            (lambda x: x.sum(), r"must return .* got \(\) for two rows"),
            (lambda x: x[:1], r"must return .* got \(1, 2\) for two rows"),
            (lambda x: [x], r"must return .* got <class 'list'>"),
            (lambda x: {}, r"must return .* got <class 'dict'>"),
            (lambda x: {"a": 1}, r"must return .* got <class 'int'>"),
        ],
        ids=["fails", "a number", "fewer rows", "a list", "nothing", "no tensor"],
    )
    def test_unusable_outputs_of_it_are_refused_in_the_dry_run(
        self, postprocess, message
    ):
        with pytest.raises(ModelError, match=f"postprocess {message}"):
            predict(nn.Identity(), X, postprocess=postprocess)


Named = namedtuple("Named", ["sum", "double"])


@pytest.mark.parametrize(
    ("structure", "output"),
    [
        (dict, "double"),
        (dict, 1),
        (UserDict, "double"),
        (SimpleNamespace, "double"),
        (Named, "double"),
        (Named, -1),
        (lambda sum, double: (sum, double), 1),
    ],
)
class TestOneOfSeveralOutputs:
    def test_is_chosen_by_name_or_position(self, structure, output):
        model = Several(structure)

        assert np.array_equal(predict(model, X, output=output), 2 * X)
        outputs = predict(model, lazy(), output=output, postprocess=lambda x: x + 1)
        assert np.array_equal(outputs.compute(), 2 * X + 1)
        with daskdl.Predictor(model, output=output, client=False) as predictor:
            assert np.array_equal(predictor(X), 2 * X)


class Several(nn.Module):
    def __init__(self, structure):
        super().__init__()
        self.structure = structure

    def forward(self, x):
        return self.structure(sum=x.sum(dim=1), double=2 * x)


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        (Several(dict), "dubble", "output='dubble' is not among the model's outputs, "
         "'sum', 'double'"),
        (Several(Named), 2, "output=2 is not among the model's outputs, 'sum', "
         "'double'"),
        (Sum(), "sums", "output='sums' selects one of several outputs, but the model "
         "returns a single Tensor: leave output out"),
        (Sum(), 1.5, "output must be the name or position of one of the model's "
         "outputs, or None for all, got 1.5"),
    ],
    ids=["name", "position", "one tensor", "number"],
)  # fmt: skip
def test_an_output_that_is_not_there_is_refused(model, output, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        predict(model, X, output=output)


def test_an_output_that_is_no_tensor_is_told_to_be_left_out():
    model = Several(lambda sum, double: {"sum": sum, "cache": object()})

    assert predict(model, X, output="sum").tolist() == SUMS
    with pytest.raises(ModelError, match="; select one of several outputs by name"):
        predict(model, X)
