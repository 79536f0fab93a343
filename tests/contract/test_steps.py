import math

import numpy as np
import pytest

from daskdl import history
from daskdl.history import (
    LAYOUT,
    STEP_COLUMNS,
    StepRow,
    StepTable,
    pack_rows,
    unpack_rows,
)
from daskdl.training.base import StepStats

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


def test_what_an_exchange_says_is_the_middle_of_a_row():
    # A row is made of it by position.
    assert StepRow._fields[5:-1] == StepStats._fields
    assert ALONE[5:-1] == pytest.approx(tuple(StepStats()), nan_ok=True)


def test_a_row_has_the_documented_columns():
    assert StepRow._fields == tuple(STEP_COLUMNS)


class TestPacking:
    @pytest.mark.parametrize("numbered", [[], [(1, FULL)], [(7, FULL), (8, FULL)]])
    def test_what_was_packed_is_unpacked(self, numbered):
        assert unpack_rows(pack_rows(numbered)) == numbered

    def test_what_is_not_there_stays_so(self):
        [(number, row)] = unpack_rows(pack_rows([(5, ALONE)]))

        assert number == 5
        assert row.kind is None
        assert math.isnan(row.threshold)
        assert math.isnan(row.residual_p99)
        assert row[:4] == ALONE[:4]

    def test_values_are_pythons_own(self):
        [(_, row)] = unpack_rows(pack_rows([(1, FULL)]))

        kinds = [type(value) for value in row]

        assert kinds == [type(value) for value in FULL]

    def test_packs_can_be_put_behind_each_other(self):
        packed = pack_rows([(1, FULL)]) + pack_rows([]) + pack_rows([(2, FULL)])

        assert unpack_rows(packed) == [(1, FULL), (2, FULL)]

    def test_a_row_has_152_bytes(self):
        assert len(pack_rows([(1, FULL)] * 3)) == 3 * 152


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

    def test_a_column_is_read_over_all_rows(self):
        assert table(rows(2), rows(1, replica=1)).column("replica") == [0, 0, 1]

    def test_an_unknown_column_is_an_error(self):
        with pytest.raises(KeyError, match="val_loss"):
            table(rows(1)).column("val_loss")

    def test_of_too_many_rows_every_second_one_of_each_replica_goes(self, monkeypatch):
        monkeypatch.setattr(history, "MOST_ROWS", 6)

        own = table(rows(4), rows(4, replica=1))

        assert own.column("replica") == [0, 0, 1, 1]
        assert own.column("step") == [20, 40, 20, 40]

    def test_a_year_of_rows_does_not_grow_beyond_its_bound(self, monkeypatch):
        monkeypatch.setattr(history, "MOST_ROWS", 100)
        own = StepTable()

        for epoch in range(200):
            own.extend([(10 * epoch + n, ALONE) for n in range(1, 11)])

        assert 50 <= len(own) <= 100

    def test_a_data_frame_has_a_row_for_each_step(self):
        frame = table([(1, FULL), (2, ALONE)]).to_pandas()

        assert list(frame.columns) == list(STEP_COLUMNS)
        assert frame["step"].tolist() == [70_000_000_000, 1]
        assert frame["kind"][0] == "DENSE8"
        assert frame["kind"].isna().tolist() == [False, True]

    def test_a_data_frame_of_nothing_has_the_columns_only(self):
        frame = StepTable().to_pandas()

        assert len(frame) == 0
        assert list(frame.columns) == list(STEP_COLUMNS)

    def test_its_text_says_how_many_there_are(self):
        assert repr(table(rows(3))) == "StepTable(3 rows)"


def test_rows_of_another_release_are_read_by_their_names():
    layout = np.dtype(
        [(n, t) for n, t in LAYOUT.descr if n != "wait_s"] + [("x", "<f8")]
    )
    (written,) = np.frombuffer(pack_rows([(7, StepRow(1, 2, 3, 0.5, 0.1))]), LAYOUT)
    other = np.zeros(1, layout)
    for name in set(layout.names) & set(LAYOUT.names):
        other[name] = written[name]

    ((number, row),) = unpack_rows(other.tobytes(), layout)

    assert (number, row.epoch, row.learning_rate, row.wait_s) == (7, 1, 0.1, 0.0)


@pytest.mark.parametrize("missing", ["number", "loss"])
def test_rows_without_what_each_must_have_are_refused(missing):
    layout = np.dtype([column for column in LAYOUT.descr if column[0] != missing])

    with pytest.raises(ValueError, match=r"need their numbers|none of steps"):
        unpack_rows(np.zeros(1, layout).tobytes(), layout)
