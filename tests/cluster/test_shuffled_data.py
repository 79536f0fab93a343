"""Graphs of peer-to-peer tasks, which a cluster computes as a whole."""

import logging

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from daskdl import data
from daskdl.errors import DataError, OptionError
from tests.support.clusters import still_left_behind
from tests.support.rows import (
    FRAMES,
    ROWS,
    check_rows,
    data_of,
    rows_of_scores,
    trainer,
)

# Dask 2026.8 reads and sorts so with pandas 3.1.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")


@pytest.mark.parametrize(
    "kind", ["shuffled", "merged", "sorted", "deduplicated", "random and shuffled"]
)
def test_a_fit_meets_the_labels_of_each_row(client, tmp_path, caplog, kind):
    caplog.set_level(logging.INFO, "daskdl")
    X, y = data_of(kind, tmp_path)

    history = trainer(client).fit(X, y, validation=0.3, transform=check_rows)

    assert 0 < history[-1]["examples"] < ROWS
    assert history[-1]["val_loss"] > 0
    if kind != "deduplicated":  # which Dask shuffles by tasks without a default client
        assert caplog.text.count("the cluster computes all parts now") == 1


def test_other_passes_meet_the_labels_of_each_row_and_nothing_stays(client, tmp_path):
    table = FRAMES["merged"](tmp_path)
    X, y = table[["a"]], table["y"]

    loss = trainer(client).evaluate(X, y, transform=check_rows)["loss"]
    report = data.validate(X, y, client=client)
    data.pack(X, y, url=f"{tmp_path}/out", per_file=8, client=client)
    packed = data.files(f"{tmp_path}/out")

    assert loss > 0
    assert report.rows == packed.rows == ROWS
    for part in range(packed.parts):
        x, labels = packed.load(part)
        np.testing.assert_array_equal(x[:, 0], -labels)
    assert still_left_behind(client) == {}


def test_lazy_outputs_and_scores_have_the_keys_of_their_rows(forgetful, tmp_path):
    table = FRAMES["shuffled"](tmp_path).map_partitions(
        lambda table: table.set_index("id")
    )
    keyed = FRAMES["merged"](tmp_path)

    outputs = trainer(forgetful).predict(table[["a"]])
    scores = trainer(forgetful).score_examples(keyed[["a", "id"]], keyed["y"], key="id")

    outputs, scores = forgetful.gather(forgetful.compute([outputs, scores]))
    np.testing.assert_array_equal(outputs.index, outputs)
    np.testing.assert_array_equal(scores.index, rows_of_scores(scores))
    assert len(outputs) == len(scores) == ROWS


def test_arrays_of_a_shuffled_dataframe_are_refused_unless_it_is_persisted(
    client, tmp_path
):
    with client.as_current():
        table = FRAMES["shuffled"](tmp_path)
        X, y = (table[name].to_dask_array() for name in (["a"], "y"))
        lists = [table[name].to_delayed() for name in (["a"], "y")]
        held = table.persist()
        same = [held[name].to_dask_array() for name in (["a"], "y")]

    with pytest.raises(DataError, match=r"persist\(\) the dataframe before you make"):
        trainer(client).evaluate(X, y)
    with pytest.raises(DataError, match=r"persist\(\) the dataframe before you make"):
        trainer(client).evaluate(*lists)
    assert trainer(client).evaluate(*same, transform=check_rows)["loss"] > 0


def test_data_that_no_worker_can_compute_are_an_error_that_names_the_task(client):
    rows = pd.DataFrame({"a": [0.0, 1.0], "y": [0.0, 1.0]})
    part = client.submit(rows.copy, key="needs-a-gpu", resources={"GPU": 1})
    table = dd.from_delayed([part, part], meta=rows, verify_meta=False).shuffle("a")

    with (
        dask.config.set({"daskdl.timeouts.silence": "1s"}),
        pytest.raises(DataError, match="no worker can run 'needs-a-gpu'"),
    ):
        trainer(client).evaluate(table[["a"]], table["y"])


@pytest.mark.filterwarnings("ignore:Dask annotations")
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_placement_by_an_enclosing_annotation_is_refused(client, tmp_path, method):
    table = FRAMES["merged"](tmp_path)

    with (
        dask.annotate(resources={"GPU": 1}),
        pytest.raises(OptionError, match=r"enclosing dask\.annotate"),
    ):
        getattr(trainer(client), method)(table[["a"]], table["y"])


def test_arrays_that_are_rechunked_peer_to_peer_keep_their_rows(client):
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        columns = da.from_array(np.arange(400.0).reshape(20, 20), chunks=(20, 2))
        rows = columns.rechunk((5, 20))

    loss = trainer(client).evaluate(rows[:, :1], -rows[:, 0], transform=check_rows)

    assert loss["loss"] > 0
