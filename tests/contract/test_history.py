"""Rows of epochs and steps: tables, packing, sampling of steps and residuals."""

import math

import numpy as np
import pytest
import torch

from daskdl import history
from daskdl.compression.compressor import Sample
from daskdl.history import (
    COLUMNS,
    LAYOUT,
    STEP_COLUMNS,
    History,
    StepRow,
    StepTable,
    pack_rows,
    unpack_rows,
)
from daskdl.training import telemetry
from daskdl.training.telemetry import SHARE, StepLog, spread_of

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
    assert history[0] is ROWS[0]
    assert history[-1] is ROWS[2]
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
    return [(n, StepRow(0, 10 * n, replica, 1 / n)) for n in range(1, count + 1)]


def table(*batches):
    made = StepTable()
    for batch in batches:
        made.extend(batch)
    return made


@pytest.mark.parametrize("numbered", [[], [(1, FULL)], [(7, FULL), (8, FULL)]])
def test_packed_rows_are_unpacked(numbered):
    assert unpack_rows(pack_rows(numbered)) == numbered


def test_missing_values_stay_missing_when_packed():
    [(number, row)] = unpack_rows(pack_rows([(5, ALONE)]))

    assert (number, row[:4], row.kind) == (5, ALONE[:4], None)
    assert math.isnan(row.threshold)


class TestStepTable:
    def test_it_is_a_sequence_of_mappings(self):
        own = table(rows(3))

        assert len(own) == 3
        assert own[0].keys() == STEP_COLUMNS.keys()
        assert table([(1, FULL)])[0] == FULL._asdict()
        assert own[-1]["step"] == 30
        assert [row["step"] for row in own] == [10, 20, 30]
        assert [row["step"] for row in own[1:]] == [20, 30]
        with pytest.raises(IndexError):
            own[3]

    def test_every_second_row_of_each_replica_goes_if_there_are_too_many(
        self, monkeypatch
    ):
        monkeypatch.setattr(history, "MOST_ROWS", 6)

        own = table(rows(4), rows(4, replica=1))

        assert own.column("replica") == [0, 0, 1, 1]
        assert own.column("step") == [20, 40, 20, 40]

    def test_a_data_frame_has_a_row_for_each_step(self):
        frame = table([(1, FULL), (2, ALONE)]).to_pandas()

        assert list(frame.columns) == list(STEP_COLUMNS)
        assert frame["step"].tolist() == [70_000_000_000, 1]
        assert frame["kind"][0] == "DENSE8"
        assert frame["kind"].isna().tolist() == [False, True]


@pytest.mark.parametrize("missing", ["number", "loss"])
def test_rows_without_required_columns_are_refused(missing):
    layout = np.dtype([column for column in LAYOUT.descr if column[0] != missing])

    with pytest.raises(ValueError, match=r"need their numbers|none of steps"):
        unpack_rows(np.zeros(1, layout).tobytes(), layout)


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(log, clock, steps, step_s, row_s=0.0):
    """Log steps of a duration; return those that had a row."""
    had = []
    for step in steps:
        clock.now += step_s
        if log.due(step):
            clock.now += row_s
            log.add(StepRow(0, step, 0, 1.0))
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

        assert 0.5 * SHARE < len(had) * row_s / (clock.now - began) <= 1.5 * SHARE

    def test_one_slow_row_delays_only_the_next(self):
        clock = Clock()
        log = StepLog("auto", clock)
        run(log, clock, [1], 1.0, row_s=1.0)

        had = run(log, clock, range(2, 400), 1.0)

        assert had[0] == 201
        assert had[1] == 211


@pytest.mark.parametrize("every", [1, "auto"])
def test_too_many_rows_for_one_report_are_thinned(monkeypatch, every):
    monkeypatch.setattr(telemetry, "MOST_ROWS", 8)
    clock = Clock()
    log = StepLog(every, clock)

    run(log, clock, range(1, 1001), 1.0)
    first = unpack_rows(log.take())
    run(log, clock, range(1001, 1101), 1.0)
    second = unpack_rows(log.take())

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
