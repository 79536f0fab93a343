"""What a plan looks like."""

import pickle

import pytest

from daskdl.planning.cost_model import predictions
from daskdl.planning.plan import Plan
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.planned import FAST, measured


def planned(workers=(1, 2, 4), link=FAST, **changes):
    costs = measured(**changes)
    rows = predictions(costs, GradientSharing(), link, workers)
    return Plan(rows, "Advice <of 1>.", costs, link)


def test_it_prints_a_table_under_what_it_is_about():
    heading, names, one, two, four, advice = str(planned()).splitlines()

    assert heading == (
        "1,000,000 parameters, 64 rows a step, 1 thread; 12.5 KB an update; "
        "1 Gbit/s, 0 ms one way"
    )
    assert names == "workers  efficiency  samples/s  step ms    limit  carried"
    assert one.split() == ["1", "1.00", "640", "100.0", "compute", "100%"]
    assert two.split() == ["2", "0.87", "1,111", "115.2", "encode", "100%"]
    assert len({len(line) for line in (names, one, two, four)}) == 1
    assert advice == "Advice <of 1>."


def test_it_says_where_workers_are_on_one_machine():
    heading = str(planned(link=None, threads=2)).splitlines()[0]

    assert heading.endswith("2 threads; 12.5 KB an update; processes of this machine")


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (16, [*range(1, 17)]),
        (17, [1, 2, 4, 8, 16, 17]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_of_many_rows_some_are_shown(last, expected):
    _, _, *rows, _ = str(planned(tuple(range(1, last + 1)))).splitlines()

    assert [int(row.split()[0]) for row in rows] == expected


def test_all_rows_are_there():
    assert [row.workers for row in planned(tuple(range(1, 65))).rows] == [*range(1, 65)]


def test_as_a_frame_it_has_all_rows_and_all_parts():
    frame = planned().to_pandas()

    assert frame.index.tolist() == [1, 2, 4]
    assert frame.loc[2, "encode_s"] == 0.01
    parts = ["compute_s", "encode_s", "apply_s", "messages_s", "wait_s"]
    assert frame[parts].sum(axis=1).tolist() == pytest.approx(frame["step_s"].tolist())


def test_in_a_notebook_it_is_a_table_of_the_same():
    shown = planned()._repr_html_()

    assert shown.count("<tr>") == 4
    assert "<td>1,111</td>" in shown
    assert "<p>Advice &lt;of 1&gt;.</p>" in shown


def test_it_is_frozen_and_can_be_kept():
    plan = planned()

    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError):
        plan.advice = ""
