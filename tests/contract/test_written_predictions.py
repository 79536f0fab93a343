"""Predictions at a URL: nothing lost, nothing written twice, nothing half taken."""

import json

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
from daskdl.inference import predictions
from daskdl.inference.predictions import fingerprint
from tests.support import s3

X = np.arange(14.0, dtype=np.float32).reshape(7, 2)
TABLE = pd.DataFrame(X, columns=["a", "b"], index=pd.Index(list("tuvwxyz"), name="who"))


class Both(nn.Module):
    def forward(self, x):
        return {"sum": x.sum(dim=1), "twice": (2 * x,)}


class Columns(nn.Module):
    def forward(self, x):
        return {"sum": x.sum(dim=1), "first": x[:, 0].to(torch.int32)}


class Having(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.layer = nn.Identity()
        self.layer.factor = factor

    def forward(self, x):
        return x * self.layer.factor


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture(params=["memory", "local"])
def url(request, tmp_path):
    """A place for predictions; in memory its files are deleted afterwards."""
    if request.param == "local":
        yield str(tmp_path / "predictions")
        return
    yield "memory://daskdl-test-predictions"
    Store("memory://daskdl-test-predictions").delete_all()


@pytest.fixture
def written(monkeypatch):
    """Names of the files that are written, in order, from now on."""
    names = []
    write = Store.write

    def noted(store, name, content):
        names.append(name)
        write(store, name, content)

    monkeypatch.setattr(Store, "write", noted)
    return names


def lazy(rows=3):
    return da.from_array(X, chunks=(rows, 2))


def say(data, url, model=None, **options):
    model = nn.Identity() if model is None else model
    return daskdl.predict(model, data, client=False, output=url, **options)


def parts_in(names):
    return [name for name in names if name.startswith("part-")]


def interrupted(monkeypatch, url, after=2, data=None, **options):
    """Begin, and interrupt it when so many parts have been written."""
    write, left = Store.write, [after]

    def stopping(store, name, content):
        if name.startswith("part-"):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        write(store, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            say(lazy() if data is None else data, url, **options)


class TestKinds:
    def test_an_array_comes_back_in_its_chunks(self, url):
        found = say(lazy(rows=(3, 0, 4)), url)

        assert found.rows == (3, 0, 4)
        assert found.to_dask().chunks == ((3, 0, 4), (2,))
        assert found.to_dask().compute().tolist() == found.load().tolist() == X.tolist()
        assert found.load().dtype == found.to_dask().dtype == np.float32

    def test_lengths_that_are_not_known_are_known_afterwards(self, url):
        x = lazy().map_blocks(lambda block: block, chunks=((np.nan,) * 3, (2,)))

        assert say(x, url).to_dask().chunks[0] == (3, 3, 1)

    def test_several_outputs_are_a_tree_of_arrays(self, url):
        found = say(lazy(), url, Both())

        for tree in (found.load(), dask.compute(found.to_dask())[0]):
            assert tree["sum"].tolist() == X.sum(axis=1).tolist()
            assert tree["twice"][0].tolist() == (2 * X).tolist()

    def test_what_is_in_memory_comes_back_as_an_array(self, url):
        found = say(X, url, batch_size=2)

        assert found.load().tolist() == X.tolist()
        assert found.to_dask()[2:5].compute().tolist() == X[2:5].tolist()

    def test_a_table_comes_back_with_its_index_and_divisions(self, url):
        table = dd.from_pandas(TABLE, npartitions=3)

        found = say(table, url, Columns())

        expected = pd.DataFrame(
            {"sum": X.sum(axis=1), "first": X[:, 0].astype(np.int32)}, TABLE.index
        )
        pd.testing.assert_frame_equal(found.load(), expected)
        assert found.to_dask().divisions == table.divisions
        pd.testing.assert_frame_equal(found.to_dask().compute(), expected)

    @pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's, of pandas 3.1
    def test_a_table_can_be_read_by_others(self, tmp_path):
        say(dd.from_pandas(TABLE, npartitions=3), str(tmp_path), Columns())

        assert dd.read_parquet(str(tmp_path)).compute().index.tolist() == list(
            "tuvwxyz"
        )
        assert pd.read_parquet(tmp_path)["sum"].tolist() == X.sum(axis=1).tolist()

    @pytest.mark.parametrize(
        "model", [nn.Identity(), nn.Flatten(0)], ids=["frame", "series"]
    )
    def test_columns_without_names_come_back_without(self, url, model):
        frame = dd.from_pandas(TABLE[["a"]], npartitions=2)
        expected = daskdl.predict(model, frame, client=False).compute()

        found = say(frame, url, model)

        same = (
            pd.testing.assert_series_equal
            if expected.ndim == 1
            else pd.testing.assert_frame_equal
        )
        # Parquet has one kind of text: the index is of another dtype of pandas.
        same(found.load(), expected, check_index_type=False)
        same(found.to_dask().compute(), expected, check_index_type=False)

    def test_columns_that_could_not_be_told_are_refused(self, url):
        with pytest.raises(
            ModelError, match=r"must have text as names .* got \[5, 7\]"
        ):
            say(
                dd.from_pandas(TABLE, npartitions=2),
                url,
                postprocess=lambda rows: {5: rows[:, 0], 7: rows[:, 1]},
            )

    def test_a_partition_without_rows_stays_so(self, url):
        table = dd.from_pandas(TABLE, npartitions=3)

        found = say(table[table["a"] > 11], url)

        assert found.rows == (0, 0, 1)
        assert found.load().index.tolist() == ["z"]
        assert found.to_dask().compute().index.tolist() == ["z"]

    def test_outputs_that_are_several_tables_are_refused(self, url):
        with pytest.raises(ModelError, match=r"one table .* got \{'sum': \., 'twice'"):
            say(dd.from_pandas(TABLE, npartitions=2), url, Both())

    def test_a_bag_comes_back_with_its_keys_and_shapes(self, url):
        examples = [((i, b"k"), np.full(1 + i % 2, i, np.float32)) for i in range(5)]
        bag = dask.bag.from_sequence(examples, npartitions=2)

        found = say(bag, url)

        for pairs in (found.load(), found.to_dask().compute()):
            assert [key for key, _ in pairs] == [key for key, _ in examples]
            assert [y.tolist() for _, y in pairs] == [x.tolist() for _, x in examples]

    def test_a_bag_may_have_empty_partitions_and_several_outputs(self, url):
        bag = dask.bag.from_sequence(list(X), npartitions=3)

        found = say(bag.filter(lambda row: row[0] > 9), url, Both())

        assert [float(one["sum"]) for one in found.load()] == [21.0, 25.0]
        assert [one["twice"][0].tolist() for one in found.load()] == [
            [20, 22],
            [24, 26],
        ]
        assert found.to_dask().npartitions == 3

    def test_a_list_comes_back_as_a_list(self, url):
        parts = [dask.delayed(X[:4]), dask.delayed(list(X[4:]), traverse=False)]

        found = say(parts, url)

        rows, examples = found.load()
        assert rows.tolist() == X[:4].tolist()
        assert [one.tolist() for one in examples] == X[4:].tolist()
        assert found.to_dask()[0].compute().tolist() == X[:4].tolist()


class TestResuming:
    @pytest.mark.parametrize("data", [lazy(), X], ids=["lazy", "in memory"])
    def test_only_the_parts_that_are_missing_are_made(
        self, monkeypatch, url, data, written
    ):
        interrupted(monkeypatch, url, 2, data, batch_size=2)
        before = set(parts_in(written))
        written.clear()

        found = say(data, url, batch_size=2)

        assert len(before) == 2
        assert len(parts_in(written)) == len(found.rows) - 2
        assert before | set(parts_in(written)) == set(Store(url).names("part-*"))
        assert found.load().tolist() == X.tolist()

    def test_what_is_finished_is_not_written_again(self, url, written):
        say(lazy(), url)
        written.clear()

        found = say(lazy(), url)

        assert written == []
        assert found.load().tolist() == X.tolist()

    def test_a_part_that_is_cut_short_is_made_again(self, monkeypatch, url, written):
        interrupted(monkeypatch, url, 2)
        first = parts_in(written)[0]
        store = Store(url)
        store.write(first, store.read(first)[:-1])
        written.clear()

        assert say(lazy(), url).load().tolist() == X.tolist()
        assert len(parts_in(written)) == 2

    def test_what_is_unfinished_is_not_read(self, monkeypatch, url):
        interrupted(monkeypatch, url, 2)

        with pytest.raises(DataError, match=r"no finished predictions in .* goes on"):
            daskdl.Predictions(url)

    def test_a_file_without_a_record_is_not_taken_for_a_part(self, url, written):
        store = Store(url)
        store.write("part-000000-00000000.safetensors", b"half")
        written.clear()

        assert say(lazy(), url).load().tolist() == X.tolist()
        assert len(parts_in(written)) == 3
        assert len(store.names("part-*")) == 3

    def test_nothing_else_is_left(self, url):
        say(lazy(), url)

        names = Store(url).names()
        assert [n for n in names if not n.startswith("part-")] == [predictions.NAME]

    def test_a_late_part_of_a_run_that_is_over_is_taken_away(self, url, monkeypatch):
        from daskdl.inference.predictions import Target

        finish, kept = Target.finish, []

        def keeping(target, form, files):
            kept.append((target, form))
            return finish(target, form, files)

        monkeypatch.setattr(Target, "finish", keeping)
        say(lazy(), url)
        names = Store(url).names()

        ((target, form),) = kept
        with pytest.raises(DataError, match="no unfinished prediction in"):
            target.write(form, 0, [X[:1]])
        target.begin()
        write = Store.write

        def ending(store, name, content):
            write(store, name, content)
            if name.startswith("part-"):  # the run ends while it is written
                target._progress.end()

        monkeypatch.setattr(Store, "write", ending)
        for late in (X[:1], X[:3]):  # another one, and that which is there
            with pytest.raises(DataError, match="no unfinished prediction in"):
                target.write(form, 0, [late])
            assert Store(url).names() == names
            target.begin()


class TestOthersAtTheUrl:
    @pytest.mark.parametrize("finished", [True, False])
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"model": nn.Flatten()}, "model was"),
            ({"data": da.from_array(X + 1, chunks=(3, 2))}, "data was"),
            ({"batch_size": 3}, "batch_size was 64 and is 3"),
            ({"postprocess": torch.abs}, "postprocess was None and is"),
            ({"transform": tuple}, "transform was None and is"),
        ],
        ids=["model", "data", "batch size", "postprocess", "transform"],
    )
    def test_they_are_an_error_that_says_so(
        self, monkeypatch, url, finished, other, message
    ):
        if finished:
            say(lazy(), url)
        else:
            interrupted(monkeypatch, url, 2)
        files = Store(url).names()

        with pytest.raises(OptionError, match=rf"of another model, .*{message}"):
            say(**({"data": lazy(), "url": url} | other))
        assert Store(url).names() == files

    def test_batch_files_are_left_alone(self, url):
        daskdl.data.export(X, url, 4, client=False)

        with pytest.raises(OptionError, match="there are batch files in"):
            say(lazy(), url)

    def test_models_are_told_by_their_numbers_and_their_layers(self):
        one = nn.Linear(2, 2)
        same = nn.Linear(2, 2)
        same.load_state_dict(one.state_dict())

        assert fingerprint(one) == fingerprint(same)
        with torch.no_grad():
            same.bias += 1
        assert fingerprint(one) != fingerprint(same)
        assert fingerprint(nn.ReLU()) != fingerprint(nn.Tanh())

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (2.0, 3.0),
            ("a", "b"),
            ([1, {"k": 2}], [1, {"k": 3}]),
            (torch.zeros(2), torch.ones(2)),
            (np.zeros(2), np.ones(2)),
            ({"a"}, {"b"}),
            (torch.relu, torch.tanh),
            (lambda x: x * 2, lambda x: x * 3),
        ],
        ids=[
            "number",
            "text",
            "nested",
            "tensor",
            "array",
            "set",
            "function",
            "lambda",
        ],
    )
    def test_models_are_told_by_what_their_layers_have(self, first, second):
        assert fingerprint(Having(first)) == fingerprint(Having(first))
        assert fingerprint(Having(first)) != fingerprint(Having(second))

    def test_modes_and_objects_that_differ_in_each_session_tell_no_models(self):
        assert fingerprint(Having(object()).eval()) == fingerprint(Having(object()))

    def test_predictions_of_a_model_with_another_constant_are_not_taken(self, url):
        say(lazy(), url, Having(2.0))

        with pytest.raises(OptionError, match="of another model, other data or"):
            say(lazy(), url, Having(3.0))


class TestDamage:
    def test_a_damaged_part_is_named(self, url):
        found = say(lazy(), url)
        name = Store(url).names("part-000001*")[0]
        content = bytearray(Store(url).read(name))
        content[-1] ^= 1
        Store(url).write(name, bytes(content))

        with pytest.raises(DataError, match=r"part-000001.* is damaged: it has"):
            found.load()
        assert found.to_dask()[:3].compute().tolist() == X[:3].tolist()

    def test_a_damaged_manifest_is_named(self, url):
        say(lazy(), url)
        content = json.loads(Store(url).read(predictions.NAME))
        content["rows"] = 8
        Store(url).write(predictions.NAME, json.dumps(content).encode())

        with pytest.raises(
            DataError, match=r"_predictions.json is damaged: its checks"
        ):
            daskdl.Predictions(url)


def test_an_object_store_is_written_to_and_read_from(bucket, s3_endpoint):
    storage, url = s3.options(s3_endpoint), f"{bucket}/predictions"

    found = say(lazy(), url, storage_options=storage)
    again = say(lazy(), url, storage_options=storage)
    other = daskdl.Predictions(url, storage)

    assert found.rows == again.rows == other.rows == (3, 3, 1)
    assert other.to_dask().compute().tolist() == X.tolist()
    assert "secret" not in repr(found)


@pytest.mark.parametrize("output", ["arrays", 7, None], ids=repr)
def test_an_output_that_is_no_folder_is_refused(output):
    with pytest.raises(OptionError, match="output must be 'same' or a folder"):
        say(X, output)
