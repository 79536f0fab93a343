"""Rows of X, y and keys belong together, whatever graph they are computed from."""

import itertools

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import xarray
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl import (
    GradientSharing,
    ParameterAveraging,
    data,
)
from daskdl.cli import _first_batch
from daskdl.data.inputs import source_of, split_rows
from tests.support.rows import (
    ARRAYS,
    FRAMES,
    KINDS,
    ROWS,
    check_rows,
    data_of,
    examples,
    rows_of_scores,
    trainer,
    weighted_loss,
)

# Dask 2026.8 reads and sorts so with pandas 3.1.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")


@pytest.mark.parametrize("kind", KINDS)
class TestOfEveryKind:
    def test_a_fit_and_its_validation_meet_the_labels_of_each_row(self, kind, tmp_path):
        X, y = data_of(kind, tmp_path)
        validation = X if y is None else (X, y)

        history = trainer().fit(X, y, validation=validation, transform=check_rows)

        assert history[-1]["val_loss"] > 0

    def test_an_evaluation_meets_the_labels_of_each_row(self, kind, tmp_path):
        X, y = data_of(kind, tmp_path)

        assert trainer().evaluate(X, y, transform=check_rows)["loss"] > 0

    def test_packed_rows_have_the_labels_of_each_row(self, kind, tmp_path):
        X, y = data_of(kind, tmp_path)

        data.pack(X, y, url=f"{tmp_path}/out", per_file=8, client=False)

        files = data.files(f"{tmp_path}/out")
        for part in range(files.parts):
            x, labels = files.load(part)
            np.testing.assert_array_equal(x[:, 0], -labels)

    def test_a_validation_of_the_data_and_a_plan_read_them(self, kind, tmp_path):
        X, y = data_of(kind, tmp_path)

        report = data.validate(X, y, client=False)

        assert report.rows >= 30
        assert not any(report.counts.values())
        check_rows(_first_batch((X, y), 8, None))


def _keyed(kind, tmp_path):
    if kind in FRAMES:
        table = FRAMES[kind](tmp_path)
        return (table[["a", "id"]], table["y"]), "id"
    x, y, key = ARRAYS[kind]()
    return (x, y), key


@pytest.mark.parametrize("kind", [*FRAMES, *ARRAYS])
class TestKeys:
    def test_scores_have_the_keys_of_their_rows(self, kind, tmp_path):
        data, key = _keyed(kind, tmp_path)

        scores = trainer().score_examples(*data, key=key).compute(scheduler="sync")

        assert len(scores) >= 30
        assert rows_of_scores(scores) == pytest.approx(scores.index.to_numpy())


# Parts of the one that is left out repeat random tasks, and have no such rows.
@pytest.mark.parametrize(
    "kind", [kind for kind in [*FRAMES, *ARRAYS] if "random and rech" not in kind]
)
def test_weights_are_those_of_their_rows(kind, tmp_path):
    data, weight = _keyed(kind, tmp_path)
    if isinstance(weight, str):
        table, y = data
        data, weight = (table[["a"]], y), table["id"]

    score = trainer().evaluate(*data, sample_weight=weight)

    rows = np.asarray(weight, dtype=float)  # random ones come in another order
    assert score["loss"] == pytest.approx(weighted_loss(rows, rows))


def test_keys_of_examples_are_of_the_computation_that_is_scored():
    keyed = examples().map(lambda pair: (int(pair[0].item()), pair))

    pairs = trainer().score_examples(keyed, key=True).compute(scheduler="sync")

    keys, scores = zip(*pairs, strict=True)

    assert rows_of_scores(np.array(scores)) == pytest.approx(keys)


@pytest.mark.parametrize("kind", FRAMES)
def test_predictions_have_the_index_of_their_rows(kind, tmp_path):
    table = FRAMES[kind](tmp_path).map_partitions(lambda table: table.set_index("id"))

    outputs = trainer().predict(table[["a"]]).compute(scheduler="sync")

    assert len(outputs) >= 30
    np.testing.assert_array_equal(outputs.index, outputs)


@pytest.mark.parametrize("kind", FRAMES)
def test_a_column_of_labels_is_split_from_rows_of_one_computation(kind, tmp_path):
    table = FRAMES[kind](tmp_path)[["a", "y"]]

    assert trainer().evaluate(table, label="y", transform=check_rows)["loss"] > 0


@pytest.mark.parametrize("kind", [kind for kind in FRAMES if "random" not in kind])
def test_a_fraction_for_validation_shares_no_row_with_the_rest(kind, tmp_path):
    X, y = data_of(kind, tmp_path)
    rows = data.validate(X, y, client=False).rows

    halves = [source_of(*half) for half in split_rows(X, y, 0.5, seed=0)]

    loaded = [[half.load(part) for part in range(half.parts)] for half in halves]
    for x, labels in loaded[0] + loaded[1]:
        np.testing.assert_array_equal(x[:, 0], -labels)
    trained, scored = ([v for x, _ in half for v in x[:, 0]] for half in loaded)
    assert len(trained) + len(scored) == rows
    assert min(len(trained), len(scored)) > 0.2 * rows
    assert kind == "concatenated" or not {*trained} & {*scored}


def _chunked(array, edges):
    """A ``dask.array`` with blocks between these edges, of which some may be empty."""
    chunks = tuple(b - a for a, b in itertools.pairwise([0, *sorted(edges), ROWS]))
    return da.from_array(array, chunks=(chunks, *array.shape[1:]))


FORMS = {
    "numpy": lambda array, edges: array,
    "torch": lambda array, edges: torch.from_numpy(array),
    "pandas": lambda array, edges: (pd.Series, pd.DataFrame)[array.ndim - 1](array),
    "dask": _chunked,
    "zarr": lambda array, edges: zarr.array(
        array, chunks=(len(edges) + 3, 1)[: array.ndim]
    ),
    "xarray": lambda array, edges: xarray.DataArray(
        _chunked(array, edges), dims=["row", "column"][: array.ndim]
    ),
}  # fmt: skip
EDGES = st.lists(st.integers(0, ROWS), max_size=5)
FORM = st.tuples(st.sampled_from(sorted(FORMS)), EDGES)


@pytest.mark.parametrize("master", [GradientSharing, ParameterAveraging])
@settings(max_examples=30)
@given(forms=st.tuples(FORM, FORM, FORM), share=st.booleans(), shuffle=st.booleans())
def test_arrays_of_any_kinds_are_paired_row_by_row(master, forms, share, shuffle):
    rows = np.arange(ROWS, dtype=np.float32)
    weights = (rows * 7) % 10
    X, y, weight = (
        FORMS[form](array, edges)
        for array, (form, edges) in zip(
            (rows[:, None], -rows, weights), forms, strict=True
        )
    )
    train, held = np.arange(ROWS), np.arange(ROWS)
    if share:
        (train, _), (held, _) = split_rows(train, None, 0.25, seed=0)

    history = trainer(master=master()).fit(
        X,
        y,
        sample_weight=weight,
        validation=0.25 if share else (X, y, weight),
        batch_size=8,
        shuffle=shuffle,
    )

    assert history[0]["examples"] == len(train)
    assert history[0]["loss"] == pytest.approx(weighted_loss(train, weights[train]))
    assert history[0]["val_loss"] == pytest.approx(weighted_loss(held, weights[held]))
