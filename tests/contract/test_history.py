import pytest

from daskdl.history import COLUMNS, History

ROWS = [
    dict.fromkeys(COLUMNS, 0) | {"epoch": 0, "loss": 0.5, "waits": {"room": 1.0}},
    dict.fromkeys(COLUMNS, 0) | {"epoch": 1, "loss": 0.25, "waits": {}},
    dict.fromkeys(COLUMNS, 0) | {"epoch": 2, "loss": 0.123456, "waits": {}},
]


def test_a_history_is_a_sequence_of_its_rows():
    history = History(ROWS)

    assert len(history) == 3
    assert list(history) == ROWS
    assert history[0] is ROWS[0]
    assert history[-1] is ROWS[2]
    assert history[1:] == ROWS[1:]
    assert ROWS[1] in history


def test_a_row_is_added_at_the_end():
    history = History(ROWS[:1])

    history.append(ROWS[1])

    assert list(history) == ROWS[:2]


def test_the_rows_it_was_made_of_are_left_alone():
    rows = ROWS[:1]

    History(rows).append(ROWS[1])

    assert rows == ROWS[:1]


def test_a_column_is_read_over_all_epochs():
    assert History(ROWS).column("loss") == [0.5, 0.25, 0.123456]


def test_an_unknown_column_is_an_error():
    with pytest.raises(KeyError, match="accuracy"):
        History(ROWS).column("accuracy")


def test_the_table_has_a_row_for_each_epoch():
    table = History(ROWS).to_pandas()

    assert table.index.name == "epoch"
    assert table.index.tolist() == [0, 1, 2]
    assert table["loss"].tolist() == [0.5, 0.25, 0.123456]
    assert table.columns.tolist() == [name for name in COLUMNS if name != "epoch"]
    assert table["waits"][0] == {"room": 1.0}


def test_the_table_of_no_epochs_has_the_columns_only():
    table = History().to_pandas()

    assert len(table) == 0
    assert table.columns.tolist() == [name for name in COLUMNS if name != "epoch"]


@pytest.mark.parametrize(
    ("rows", "text"),
    [([], "History(no epochs)"), (ROWS, "History(3 epochs, last loss 0.1235)")],
)
def test_its_text_says_how_far_it_came(rows, text):
    assert repr(History(rows)) == text
