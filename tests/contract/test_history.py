"""Rows of epochs, steps and layers: tables, packing, sampling."""

import math

import numpy as np
import pytest
import torch

from daskdl.compression.compressor import Sample
from daskdl.observe import tables
from daskdl.observe.history import COLUMNS, History
from daskdl.observe.tables import (
    LAYER_COLUMNS,
    STEP_COLUMNS,
    LayerRow,
    LayerTable,
    StepRow,
    StepTable,
    layout_of,
    pack_rows,
    unpack_rows,
)
from daskdl.training import telemetry
from daskdl.training.telemetry import TIME_FRACTION, StepLog, measured, spread_of
from tests.support.problems import Clock

ROWS = [
    dict.fromkeys(COLUMNS, 0) | {"epoch": 0, "loss": 0.5, "waits": {"room": 1.0}},
    dict.fromkeys(COLUMNS, 0) | {"epoch": 1, "loss": 0.25, "waits": {}},
    dict.fromkeys(COLUMNS, 0) | {"epoch": 2, "loss": 0.123456, "waits": {}},
]


def test_a_history_is_a_sequence_of_its_rows():
    history = History(ROWS[:1])
    for row in ROWS[1:]:
        history.append(row)

    assert len(history) == 3
    assert list(history) == ROWS
    assert history[0] == ROWS[0]
    assert history[-1] == ROWS[2]
    assert history[1:] == ROWS[1:]
    assert ROWS[1] in history
    assert history.column("loss") == [0.5, 0.25, 0.123456]


def test_a_data_frame_has_a_row_for_each_epoch():
    table = History(ROWS).to_pandas()

    assert table.index.name == "epoch"
    assert table.index.tolist() == [0, 1, 2]
    assert table["loss"].tolist() == [0.5, 0.25, 0.123456]
    assert table.columns.tolist() == [name for name in COLUMNS if name != "epoch"]
    assert table["waits"][0] == {"room": 1.0}


@pytest.mark.parametrize(
    ("rows", "text"),
    [([], "History(no epochs)"), (ROWS, "History(3 epochs, last loss 0.1235)")],
)
def test_the_repr_has_epochs_and_last_loss(rows, text):
    assert repr(History(rows)) == text


FULL = StepRow(
    epoch=3,
    step=70_000_000_000,
    replica=2,
    loss=0.1,
    learning_rate=0.05,
    threshold=1e-3,
    density=0.25,
    sent_bytes=5_000_000_000,
    kind="DENSE8",
    residual_norm=1.5,
    residual_p50=0.5,
    residual_p90=0.75,
    residual_p99=2.5,
    staleness=4,
    wait_s=0.125,
    encode_s=0.0625,
    apply_s=0.03125,
    step_s=0.3,
)
ALONE = StepRow(epoch=0, step=1, replica=0, loss=2.0)


def rows(count, replica=0):
    return [
        (n, StepRow(epoch=0, step=10 * n, replica=replica, loss=1 / n))
        for n in range(1, count + 1)
    ]


def table(*batches):
    table = StepTable()
    for batch in batches:
        table.extend(batch)
    return table


@pytest.mark.parametrize(
    "lookup",
    [
        lambda epochs, steps: epochs[-1]["los"],
        lambda epochs, steps: epochs[1:][0]["los"],
        lambda epochs, steps: epochs.column("los"),
        lambda epochs, steps: steps[-1]["los"],
        lambda epochs, steps: steps.column("los"),
    ],
)
def test_a_missing_column_is_answered_with_those_that_there_are(lookup):
    history = History(ROWS[:1])
    history.append(ROWS[1])

    with pytest.raises(
        KeyError, match=r"no column 'los'; did you mean 'loss'.*epoch, "
    ):
        lookup(history, table(rows(3)))


@pytest.mark.parametrize("numbered", [[], [(1, FULL)], [(7, FULL), (8, FULL)]])
def test_packed_rows_are_unpacked(numbered):
    assert unpack_rows(pack_rows(numbered), StepRow) == numbered


def test_missing_values_stay_missing_when_packed():
    [(number, row)] = unpack_rows(pack_rows([(5, ALONE)]), StepRow)

    assert (number, row.step, row.loss, row.kind) == (5, 1, 2.0, None)
    assert math.isnan(row.threshold)


class TestStepTable:
    def test_it_is_a_sequence_of_mappings(self):
        steps = table(rows(3))

        assert len(steps) == 3
        assert steps[0].keys() == STEP_COLUMNS.keys()
        assert table([(1, FULL)])[0] == vars(FULL)
        assert steps[-1]["step"] == 30
        assert [row["step"] for row in steps] == [10, 20, 30]
        assert [row["step"] for row in steps[1:]] == [20, 30]
        with pytest.raises(IndexError):
            steps[3]

    def test_every_second_row_of_each_replica_goes_if_there_are_too_many(
        self, monkeypatch
    ):
        monkeypatch.setattr(tables, "MAX_ROWS", 6)

        steps = table(rows(4), rows(4, replica=1))

        assert steps.column("replica") == [0, 0, 1, 1]
        assert steps.column("step") == [20, 40, 20, 40]

    def test_a_data_frame_has_a_row_for_each_step(self):
        frame = table([(1, FULL), (2, ALONE)]).to_pandas()

        assert list(frame.columns) == list(STEP_COLUMNS)
        assert frame["step"].tolist() == [70_000_000_000, 1]
        assert frame["kind"][0] == "DENSE8"
        assert frame["kind"].isna().tolist() == [False, True]


def layer_row(step=10, replica=0, layer=0, update=0.5, residual=math.nan):
    counts = np.arange(20, dtype="<i4").tobytes()  # it ends, and begins, with zeros
    parts = [[norm, -norm / 2, norm, counts] for norm in (4.0, 2.0, update)]
    return LayerRow(1, step, replica, layer, *(v for p in parts for v in p), residual)


def layer_table(names, *rows):
    table = LayerTable(names)
    table.extend([(row.step // 10, row) for row in rows])
    return table


class TestLayerTable:
    def test_it_is_a_sequence_of_mappings_with_names_ratios_and_counts(self):
        layers = layer_table(["a", "b"], layer_row(), layer_row(layer=1, residual=3.0))

        assert len(layers) == 2
        assert list(layers[0]) == list(LAYER_COLUMNS)
        assert layers.column("name") == ["a", "b"]
        assert layers.column("ratio") == [0.125, 0.125]
        assert layers[1]["residual_norm"] == 3.0
        assert layers[1]["gradient_counts"] == list(range(20))
        assert (layers[1]["update_low"], layers[1]["update_high"]) == (-0.25, 0.5)
        assert list(layers.to_pandas()["parameter_counts"]) == [list(range(20))] * 2

    def test_packed_rows_are_unpacked(self):
        rows = [(1, layer_row(residual=1.0)), (3, layer_row(step=30, residual=2.0))]

        assert unpack_rows(pack_rows(rows), LayerRow) == rows

    def test_means_are_over_the_replicas_that_have_the_step(self):
        rows = [layer_row(update=0.5), layer_row(step=20)]

        means = layer_table("ab", *rows, layer_row(replica=1, update=1.5)).means()

        assert means["a"][10]["update_norm"] == 1.0
        assert means["a"][10]["ratio"] == 0.25
        assert means["a"][20]["update_norm"] == 0.5
        assert math.isnan(means["a"][10]["residual_norm"])

    def test_one_step_of_each_replica_stays_however_many_rows_it_has(self, monkeypatch):
        monkeypatch.setattr(tables, "MAX_ROWS", 6)
        rows = [
            layer_row(10 * number, replica, layer)
            for replica in range(2)
            for number in range(1, 8)
            for layer in range(4)
        ]

        layers = layer_table("abcd", *rows)

        assert set(layers.column("step")) == {40}
        assert layers.column("replica") == [0] * 4 + [1] * 4

    def test_a_parameter_of_zeros_has_no_ratio(self):
        layers = layer_table("a", layer_row()._replace(parameter_norm=0.0))

        assert math.isnan(layers[0]["ratio"])

    @pytest.mark.parametrize("layer", [-1, 2])
    def test_a_row_of_no_layer_is_refused(self, layer):
        with pytest.raises(ValueError, match=f"got layer {layer} of 2 layers"):
            layer_table(["a", "b"], layer_row(layer=layer))


@pytest.mark.parametrize(
    ("values", "bounds", "counts"),
    [
        ([1.0, 2.0, 21.0], [1, 21], {0: 1, 1: 1, 19: 1}),
        ([3.0, 3.0], [3, 3], {0: 2}),
        ([0.0] * 3, [0, 0], {0: 3}),
        ([math.nan, 5.0, math.inf, -3e38, 25.0], [5, 25], {0: 1, 19: 1}),
        ([-1e37, 1e37], [-1e37, 1e37], {0: 1, 19: 1}),
        ([math.nan], [math.nan, math.nan], {}),
        ([], [math.nan, math.nan], {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_histogram_has_the_values_that_are_finite(dtype, values, bounds, counts):
    tensor = torch.tensor(values, dtype=dtype)

    norm, low, high, packed = measured(tensor)

    assert norm == pytest.approx(float(tensor.norm()), nan_ok=True)
    assert [low, high] == pytest.approx(bounds, nan_ok=True)
    numbers = np.frombuffer(packed, "<i4")
    assert {i: n for i, n in enumerate(numbers) if n} == counts


def test_norms_of_half_types_are_those_of_their_values():
    tensor = torch.full((90_000,), 300.0, dtype=torch.float16)

    # More than a float16 can be.
    assert measured(tensor)[0] == pytest.approx(90_000, rel=1e-4)


def test_norms_of_large_tensors_keep_four_digits():
    tensor = torch.full((5_000_000,), 0.1)

    assert measured(tensor)[0] == pytest.approx(0.1 * 5_000_000**0.5, rel=1e-4)


@pytest.mark.parametrize("kind", [StepRow, LayerRow])
@pytest.mark.parametrize(
    ("name", "instead"), [("number", []), ("epoch", []), ("replica", ["<f8"])]
)
def test_rows_of_another_layout_are_refused(kind, name, instead):
    columns = [column for column in layout_of(kind).descr if column[0] != name]
    layout = np.dtype([*columns, *((name, type) for type in instead)])

    with pytest.raises(ValueError, match=f"rows of {kind.__name__}: "):
        unpack_rows(np.zeros(1, layout).tobytes(), kind, layout)


@pytest.mark.parametrize("kind", [StepRow, LayerRow])
def test_rows_of_another_release_have_defaults_and_no_unknown_columns(kind):
    columns = [c for c in layout_of(kind).descr if c[0] != "residual_norm"]
    layout = np.dtype([*columns, ("speed", "<f8")])

    [(number, row)] = unpack_rows(np.ones(1, layout).tobytes(), kind, layout)

    assert (number, row.replica) == (1, 1)
    assert math.isnan(row.residual_norm)


def run(log, clock, steps, step_s, row_s=0.0):
    """Log steps of a duration; return those that had a row."""
    had = []
    for step in steps:
        clock.now += step_s
        if log.begin_row(step):
            clock.now += row_s
            log.add(StepRow(epoch=0, step=step, replica=0, loss=1.0))
            had.append(step)
    return had


def test_steps_divisible_by_a_number_have_a_row_whatever_it_costs():
    clock = Clock()

    had = run(StepLog(3, clock), clock, range(1, 13), 1e-3, row_s=1.0)

    assert had == [3, 6, 9, 12]


class TestAutomaticRows:
    @pytest.mark.parametrize(
        ("step_s", "row_s"), [(1e-3, 1e-4), (1e-3, 3e-3), (1e-2, 0.2)]
    )
    def test_rows_take_a_fixed_share_of_the_time(self, step_s, row_s):
        clock = Clock()
        began = clock.now

        had = run(StepLog("auto", clock), clock, range(1, 20_001), step_s, row_s)

        assert (
            0.5 * TIME_FRACTION
            < len(had) * row_s / (clock.now - began)
            <= 1.5 * TIME_FRACTION
        )

    def test_one_slow_row_delays_only_the_next(self):
        clock = Clock()
        log = StepLog("auto", clock)
        run(log, clock, [1], 1.0, row_s=1.0)

        had = run(log, clock, range(2, 400), 1.0)

        assert had[0] == 201
        assert had[1] == 211


@pytest.mark.parametrize("every", [1, "auto"])
def test_too_many_rows_for_one_report_are_thinned(monkeypatch, every):
    monkeypatch.setattr(telemetry, "MAX_ROWS", 8)
    clock = Clock()
    log = StepLog(every, clock)

    run(log, clock, range(1, 1001), 1.0)
    first = unpack_rows(log.take(), StepRow)
    run(log, clock, range(1001, 1101), 1.0)
    second = unpack_rows(log.take(), StepRow)

    assert 4 <= len(first) <= 8
    assert [number for number, _ in first + second] == [
        first[0][0] * n for n in range(1, len(first + second) + 1)
    ]


def sample(values, threshold=1.0):
    values = torch.tensor(values)
    return Sample(len(values), values, threshold)


@pytest.mark.parametrize("sign", [1, -1])
def test_norm_and_percentiles_of_a_whole_residual_are_exact(sign):
    values = sign * np.random.default_rng(0).permutation(np.arange(1.0, 1001.0))

    norm, *percentiles = spread_of([sample(values, threshold=0.5)])

    assert norm == pytest.approx(np.linalg.norm(values))
    assert percentiles == [2 * 500.0, 2 * 900.0, 2 * 990.0]


def test_nan_in_a_residual_shows():
    norm, *percentiles = spread_of([sample([math.nan, 1.0])])

    assert math.isnan(norm)
    assert math.isnan(percentiles[-1])
