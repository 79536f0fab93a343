"""Predictions in a folder: what is written comes back, and damage is found."""

import datetime
import uuid

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
from daskdl.data.storage import Store
from daskdl.errors import DataError, ModelError, OptionError
from tests.support import s3

X = np.arange(14.0, dtype=np.float32).reshape(7, 2)
TABLE = pd.DataFrame(X, columns=["a", "b"], index=pd.Index(list("tuvwxyz"), name="who"))
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)


class Both(nn.Module):
    def forward(self, x):
        return {"sum": x.sum(dim=1), "twice": (2 * x,)}


class Columns(nn.Module):
    def forward(self, x):
        return {"sum": x.sum(dim=1), "first": x[:, 0].to(torch.int32)}


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture(params=["memory", "local"])
def url(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path / "predictions")
        return
    yield "memory://daskdl-test-predictions"
    Store("memory://daskdl-test-predictions").delete_all()


def lazy(rows=3):
    return da.from_array(X, chunks=(rows, 2))


def write(data, url, model=None, **options):
    model = nn.Identity() if model is None else model
    return daskdl.predict(model, data, client=False, output=url, **options)


def listed(tree):
    """Arrays as lists, in any nesting."""
    if isinstance(tree, dict):
        return {key: listed(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [listed(value) for value in tree]
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree


BAG = [((i, b"k"), np.full(1 + i % 2, i, np.float32)) for i in range(5)]
BOTH = {"sum": X.sum(axis=1).tolist(), "twice": [(2 * X).tolist()]}
KINDS = {
    "an array": (lazy((3, 0, 4)), nn.Identity(), (3, 0, 4), X.tolist()),
    "several outputs of unknown lengths": (
        lazy().map_blocks(lambda block: block, chunks=((np.nan,) * 3, (2,))),
        *(Both(), (3, 3, 1), BOTH),
    ),
    "rows in memory": (X, nn.Identity(), (7,), X.tolist()),
    "a bag with keys and shapes": (
        dask.bag.from_sequence(BAG, npartitions=2),
        nn.Identity(),
        (3, 2),
        listed(BAG),
    ),
    "a bag with empty partitions and several outputs": (
        dask.bag.from_sequence(list(X), npartitions=3).filter(lambda row: row[0] > 9),
        Both(),
        (0, 1, 1),
        [
            {"sum": 21.0, "twice": [[20.0, 22.0]]},
            {"sum": 25.0, "twice": [[24.0, 26.0]]},
        ],
    ),
    "a list of rows and of examples": (
        [dask.delayed(X[:4]), dask.delayed(list(X[4:]), traverse=False)],
        nn.Identity(),
        (4, 3),
        [X[:4].tolist(), X[4:].tolist()],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_in_memory_and_lazily(url, kind):
    data, model, rows, expected = KINDS[kind]

    write(data, url, model)
    found = daskdl.Predictions(url)

    assert found.rows == rows
    assert listed(found.load()) == expected
    (computed,) = dask.compute(found.to_dask())
    assert listed(computed) == expected
    if isinstance(data, da.Array) and not isinstance(expected, dict):
        assert found.to_dask().chunks == (rows, (2,))
        assert found.load().dtype == found.to_dask().dtype == np.float32


class TestTables:
    def test_it_comes_back_with_its_index_and_divisions(self, url):
        table = dd.from_pandas(TABLE, npartitions=3)
        expected = pd.DataFrame(
            {"sum": X.sum(axis=1), "first": X[:, 0].astype(np.int32)}, TABLE.index
        )

        found = write(table, url, Columns())

        pd.testing.assert_frame_equal(found.load(), expected)
        assert found.to_dask().divisions == table.divisions
        pd.testing.assert_frame_equal(found.to_dask().compute(), expected)
        few = write(table[table["a"] > 11], url, overwrite=True)
        assert few.rows == (0, 0, 1)
        assert few.load().index.tolist() == ["z"]
        assert few.to_dask().compute().index.tolist() == ["z"]

    @pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's, of pandas 3.1
    def test_it_can_be_read_by_others(self, tmp_path):
        write(dd.from_pandas(TABLE, npartitions=3), str(tmp_path), Columns())

        assert dd.read_parquet(str(tmp_path)).compute().index.tolist() == [*"tuvwxyz"]
        assert pd.read_parquet(tmp_path)["sum"].tolist() == X.sum(axis=1).tolist()

    @pytest.mark.parametrize(
        "model", [nn.Identity(), nn.Flatten(0)], ids=["frame", "series"]
    )
    def test_columns_without_names_come_back_without(self, url, model):
        frame = dd.from_pandas(TABLE[["a"]], npartitions=2)
        expected = daskdl.predict(model, frame, client=False).compute()

        found = write(frame, url, model)

        kind = "series" if expected.ndim == 1 else "frame"
        same = getattr(pd.testing, f"assert_{kind}_equal")
        # Parquet has one kind of text: the index is of another dtype of pandas.
        same(found.load(), expected, check_index_type=False)
        same(found.to_dask().compute(), expected, check_index_type=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"model": Both()}, r"one table .* got \{'sum': \., 'twice'"),
            (
                {"postprocess": lambda rows: {5: rows[:, 0], 7: rows[:, 1]}},
                r"must have text as names .* got \[5, 7\]",
            ),
        ],
        ids=["several tables", "numbers as names"],
    )
    def test_outputs_that_parquet_cannot_hold_are_refused(self, url, options, message):
        with pytest.raises(ModelError, match=message):
            write(dd.from_pandas(TABLE, npartitions=2), url, **options)


KEYS = [
    *("ä", b"\x00\xff", 7, 2**80, True, 1.5, uuid.UUID(int=7), NOW, NOW.date()),
    *(("a", (1, b"b")), np.int64(7), np.str_("x"), np.str_("")),
    np.datetime64("2026-01-02", "D"),
]


def test_keys_are_read_back_exactly(tmp_path):
    bag = dask.bag.from_sequence([(key, X[0]) for key in KEYS], npartitions=1)

    found = [key for key, _ in write(bag, str(tmp_path), keyed=True).load()]

    assert found == KEYS
    assert list(map(type, found)) == list(map(type, KEYS))
    unknown = dask.bag.from_sequence([(frozenset(), X[0])], npartitions=1)
    with pytest.raises(DataError, match=r"must be str, .* got frozenset\(\), a frozen"):
        write(unknown, str(tmp_path / "other"), keyed=True)


class TestFormerPredictions:
    def interrupted(self, monkeypatch, url):
        write_one, parts = Store.write, []

        def stopping(store, name, content):
            parts.append(name)
            if len(parts) == 3:
                raise KeyboardInterrupt
            write_one(store, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "write", stopping)
            with pytest.raises(KeyboardInterrupt):
                write(lazy(), url, overwrite=True)

    @pytest.mark.parametrize("finished", [True, False], ids=["whole", "begun"])
    def test_they_are_replaced_only_if_that_was_said(self, monkeypatch, url, finished):
        write(lazy(1), url)
        if not finished:
            self.interrupted(monkeypatch, url)
            with pytest.raises(DataError, match="there are no finished predictions in"):
                daskdl.Predictions(url)
        Store(url).write("notes.txt", b"mine")
        before = Store(url).names()

        with pytest.raises(OptionError, match=r"there are predictions in .* overwrite"):
            write(lazy(), url)
        assert Store(url).names() == before
        found = write(lazy() + 1, url, overwrite=True)

        assert found.load().tolist() == (X + 1).tolist()
        assert len(Store(url).names("part-*")) == 3
        assert Store(url).names("[!p]*") == ["_predictions.json", "notes.txt"]

    @pytest.mark.parametrize(
        ("data", "model"),
        [(lazy(), nn.Linear(9, 9)), (dd.from_pandas(TABLE, npartitions=2), Both())],
        ids=["model", "tables"],
    )
    def test_a_call_that_is_refused_deletes_nothing(self, url, data, model):
        found = write(lazy(), url)

        with pytest.raises(ModelError):
            write(data, url, model, overwrite=True)

        assert found.load().tolist() == X.tolist()

    def test_a_part_that_was_written_twice_is_there_once(self, monkeypatch, url):
        write_one = Store.write

        def twice(store, name, content):
            write_one(store, name, content)
            if name.startswith("part-"):
                write_one(store, name.replace(name[12:20], "00000000"), b"else")

        monkeypatch.setattr(Store, "write", twice)

        found = write(lazy(), url)

        assert found.load().tolist() == X.tolist()
        assert len(Store(url).names("part-*")) == 3

    def test_batch_files_are_left_alone(self, url):
        daskdl.data.export(X, url=url, batch_size=4, client=False)

        with pytest.raises(OptionError, match="there are batch files in"):
            write(lazy(), url, overwrite=True)


def test_a_damaged_part_is_named(url):
    found = write(lazy(), url)
    name = Store(url).names("part-000001*")[0]
    content = bytearray(Store(url).read(name))
    content[-1] ^= 1
    Store(url).write(name, bytes(content))

    with pytest.raises(DataError, match=r"part-000001.* is damaged: its checksum"):
        found.load()
    assert found.to_dask()[:3].compute().tolist() == X[:3].tolist()


def test_an_object_store_is_written_to_and_read_from(bucket, s3_endpoint):
    storage, url = s3.options(s3_endpoint), f"{bucket}/predictions"

    found = write(lazy(), url, storage_options=storage)
    other = daskdl.Predictions(url, storage)

    assert found.rows == other.rows == (3, 3, 1)
    assert other.to_dask().compute().tolist() == X.tolist()
    assert "secret" not in repr(found)
