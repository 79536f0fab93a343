"""The result of an evaluation: a dict, a report, tables, JSON, pictures."""

import io
import json
import pickle
import sys
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from daskdl.errors import OptionError
from daskdl.evaluation.report import Evaluation, user_metrics
from daskdl.metrics import (
    BinaryMetrics,
    CalibrationMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.metric_parts import classes, random, sample_of, section_of

BEST = torch.tensor([0, 0, 1, 0])
SCORES = 9 * one_hot(BEST, 4).float() - torch.arange(4) / 10
CLASSES = torch.tensor([0, 0, 1, 2])
NAMES = ["cat", "dog", "owl", "yak"]


def evaluation_of(output, y, *metrics, **facts):
    sample = sample_of(output, y, **facts)
    sections = [section_of(metric, sample, output, y) for metric in metrics]
    return Evaluation({"loss": 0.25}, sections)


def classified(*more, **facts):
    return evaluation_of(SCORES, CLASSES, ClassificationMetrics(), *more, **facts)


CLASS_REPORT = """\
loss  0.2500

Classification: 4 classes, 4 labels

accuracy                   0.7500
top-2 accuracy             0.7500
precision (macro)          0.5556
recall (macro)             0.6667
F1 (macro)                 0.6000
MCC                        0.6455
ROC AUC (macro)            0.6944
average precision (macro)  0.6389

class  precision  recall      F1  ROC AUC  avg. prec.  support  predicted
cat       0.6667  1.0000  0.8000   0.7500      0.6667        2          3
dog       1.0000  1.0000  1.0000   1.0000      1.0000        1          1
owl       0.0000  0.0000  0.0000   0.3333      0.2500        1          0
yak       0.0000  0.0000  0.0000        -           -        0          0

Never predicted: owl

Without labels and never predicted, so left out of all means: yak

Confusion matrix (row: actual, column: predicted):

     cat  dog  owl  yak
cat    2    0    0    0
dog    0    1    0    0
owl    1    0    0    0
yak    0    0    0    0"""

LABEL_REPORT = """\
loss  0.2500

Multilabel: 2 labels, 3 rows

accuracy                   0.8333
exact match                0.6667
precision (macro)          0.5000
recall (macro)             1.0000
F1 (macro)                 0.6667
ROC AUC (macro)            0.7500
average precision (macro)  0.5000

label  accuracy  precision  recall      F1  ROC AUC  avg. prec.  support  predicted
red      0.6667     0.5000  1.0000  0.6667   0.7500      0.5000        1          2
wide     1.0000     0.0000  0.0000  0.0000        -           -        0          0

Without labels and never predicted, so left out of all means: wide"""

ERROR_REPORT = """\
loss  0.2500

Regression: 2 columns, 6 values

column     MSE     MAE    RMSE       R2  Pearson  values
0       0.3333  0.3333  0.5774   0.5000   0.9820       3
1       1.6667  1.0000  1.2910  -1.5000        -       3
mean    1.0000  0.6667  0.9342  -0.5000   0.9820       6

Pearson is undefined for constant labels or predictions: 1"""

USER_REPORT = """\
loss  0.2500

Metrics

MeanAbsoluteError  0.5000
rows                    3
of                  [0 1]"""

REPORTS = {
    "classes": (classified(classes=NAMES), CLASS_REPORT),
    "labels": (
        evaluation_of(
            torch.tensor([[1.0, -1.0], [1.0, -2.0], [-1.0, -3.0]]),
            torch.tensor([[1, 0], [0, 0], [0, 0]]),
            MultilabelMetrics(),
            classes=["red", "wide"],
        ),
        LABEL_REPORT,
    ),
    "numbers": (
        evaluation_of(
            torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]]),
            torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]),
            RegressionMetrics(),
        ),
        ERROR_REPORT,
    ),
    "user": (
        Evaluation(
            {"loss": 0.25},
            [user_metrics({"MeanAbsoluteError": 0.5, "rows": 3, "of": np.arange(2)})],
        ),
        USER_REPORT,
    ),
}


@pytest.mark.parametrize(("evaluation", "report"), REPORTS.values(), ids=REPORTS)
def test_an_evaluation_prints_as_a_report_and_can_be_pickled(evaluation, report):
    again = pickle.loads(pickle.dumps(evaluation))

    assert str(again) == repr(evaluation) == report
    assert json.loads(again.to_json()).keys() == evaluation.keys()


def test_values_convert_to_plain_ones_and_to_json():
    values = {"loss": 0.5, "a": {"b": np.float64(1)}, "c": (np.arange(2), "d", np.nan)}
    evaluation = Evaluation(values)

    plain = evaluation.to_dict()

    assert repr(Evaluation({"loss": 0.5})) == "{'loss': 0.5}"
    assert (plain["a"], plain["c"][:2]) == ({"b": 1.0}, [[0, 1], "d"])
    assert type(plain["a"]["b"]) is float
    read = json.loads(evaluation.to_json())
    assert read == {"loss": 0.5, "a": {"b": 1.0}, "c": [[0, 1], "d", None]}
    assert json.loads(classified().to_json())["roc_auc_per_class"][3] is None


class TestReport:
    @pytest.mark.parametrize(
        ("metrics", "y"),
        [
            (ClassificationMetrics(classes=["a", "b"]), torch.tensor([0, 1])),
            (BinaryMetrics(classes=["a", "b"]), torch.tensor([0, 1])),
            (MultilabelMetrics(classes=["a", "b"]), torch.eye(2)),
            (CalibrationMetrics(classes=["a", "b"]), torch.tensor([0, 1])),
            (RegressionMetrics(columns=["a", "b"]), torch.eye(2)),
        ],
    )
    def test_names_given_to_a_preset_replace_those_of_the_data(self, metrics, y):
        evaluation = evaluation_of(
            torch.eye(2) + 0.5, y, metrics, classes=["other", "names"]
        )

        assert evaluation.sections[0].names == ("a", "b")

    def test_of_many_classes_those_with_the_lowest_f1_are_shown(self):
        def many(count):
            y = classes(90, 60 * count, count)
            scores = random(91, len(y), count) + 2 * one_hot(y, count)
            return evaluation_of(scores, y, ClassificationMetrics())

        evaluation = many(21)

        report = str(evaluation)

        assert "lowest" not in str(many(20))
        assert "Confusion matrix" not in report
        table = report.split(
            "The 10 classes with the lowest F1 among those with labels:"
        )
        shown = [int(line.split()[0]) for line in table[1].strip().splitlines()[1:11]]
        f1 = evaluation["f1_per_class"]
        assert sorted(f1[shown]) == sorted(f1)[:10]

    def test_names_cannot_break_it(self):
        names = ["a\nb\x1b[31m", "a name that is far too long", "c", "d"]

        report = str(classified(classes=names))

        assert "\x1b" not in report
        assert "a b [31m" in report
        assert " a name th… " in report  # above its column

    def test_a_notebook_shows_tables_and_names_as_they_are(self):
        tags, texts = [], []

        class Page(HTMLParser):
            def handle_starttag(self, tag, attrs):
                tags.append(tag)

            def handle_data(self, data):
                texts.append(data)

        names = ["<script>alert(1)</script>", '"&', "c", "d"]
        Page().feed(classified(classes=names)._repr_html_())

        assert set(tags) == {"div", "h4", "p", "table", "tr", "th", "td"}
        assert texts.count("<script>alert(1)</script>") == 2  # both tables' rows
        assert texts.count('"&') >= 2
        assert "0.7500" in texts


class TestTable:
    def test_it_has_a_row_for_each_class(self):
        table = classified(CalibrationMetrics(), classes=NAMES).to_pandas()
        renamed = CalibrationMetrics(classes=["w", "x", "y", "z"])  # of other classes

        assert list(table.index) == NAMES
        assert "ece_per_class" not in classified(renamed, classes=NAMES).to_pandas()
        assert table["support"].tolist() == [2, 1, 1, 0]
        assert table.loc["dog", "f1_per_class"] == 1.0
        assert "ece_per_class" in table

    def test_all_values_are_one_row(self):
        table = classified().to_pandas("all")

        assert len(table) == 1
        assert (table.loc[0, "loss"], table.loc[0, "accuracy"]) == (0.25, 0.75)
        assert "support" not in table
        alone = Evaluation({"loss": 0.5, "accuracy": 0.25}).to_pandas()
        assert alone.to_dict("records") == [{"loss": 0.5, "accuracy": 0.25}]

    def test_own_metrics_are_one_row_whatever_their_names(self):
        values = {"f1_per_class": np.ones(3), "r2_per_column": 0.5, "count": 7}
        evaluation = Evaluation({"loss": 0.25}, [user_metrics(values)])

        table = evaluation.to_pandas()

        expected = {"loss": 0.25, "r2_per_column": 0.5, "count": 7}
        assert table.to_dict("records") == [expected]
        with pytest.raises(OptionError, match="this evaluation has no classes"):
            evaluation.to_pandas("classes")


@pytest.fixture
def three():
    scores = torch.tensor([[3.0, 0, 1], [0, 2, 1], [0, 3, 1], [0, 1, 3], [1, 0, 4]])
    metrics = ClassificationMetrics(), CalibrationMetrics(5)
    names = ["_cat", "a very long name of a dog", "$owl$"]
    return evaluation_of(scores, torch.tensor([0, 0, 1, 2, 2]), *metrics, classes=names)


def axes_of(figure):
    """The axes of a figure by title, drawn as for a file."""
    figure.savefig(io.BytesIO(), format="png")
    return {axes.get_title(): axes for axes in figure.findobj(mpl.axes.Axes)}


def test_pictures_show_the_values(three):
    drawn = axes_of(three.plot())
    below = drawn.pop("")  # or the color bar

    assert drawn.keys() == {
        *("Confusion matrix", "ROC", "Precision and recall", "Reliability")
    }
    matrix = drawn["Confusion matrix"]
    counts = {t.get_position(): t.get_text() for t in matrix.texts}
    assert counts == {(0, 0): "1", (1, 0): "1", (1, 1): "1", (2, 2): "2"}
    shares = matrix.images[0].get_array()
    np.testing.assert_allclose(shares, [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]])
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("predicted", "actual")
    for title, kind in (("ROC", "roc"), ("Precision and recall", "precision_recall")):
        lines = [line for line in drawn[title].lines if len(line.get_xdata()) > 2]
        for line, curve in zip(lines, three[f"{kind}_curves"], strict=True):
            np.testing.assert_array_equal(line.get_xydata().T, curve)
    there = three["bin_count"] > 0
    bars = drawn["Reliability"].patches
    heights = [bar.get_height() for bar in bars]
    np.testing.assert_allclose(heights, three["bin_accuracy"][there])
    starts = [bar.get_x() for bar in bars]
    np.testing.assert_allclose(starts, three["bin_edges"][:-1][there])
    assert [bar.get_height() for bar in below.patches] == three["bin_count"].tolist()


@pytest.mark.parametrize(
    ("show", "hidden", "message"),
    [
        (lambda e: e.plot("reliability"), None, "plots, 'confusion_matrix', 'roc', 'p"),
        (
            lambda e: Evaluation({"loss": 1.0}).plot(),
            None,
            "this evaluation has nothing to plot",
        ),
        (lambda e: e.plot(), "matplotlib.figure", r"pip install 'daskdl\[plots\]"),
        (lambda e: e.to_pandas("columns"), None, "\"all\" or None, got 'columns'"),
        (
            lambda e: Evaluation({"loss": 1.0}).to_pandas("classes"),
            None,
            "this evaluation has no classes",
        ),
        (lambda e: e.to_pandas(), "pandas", r"pip install 'daskdl\[dataframe\]"),
    ],
    ids=["kind", "nothing", "matplotlib", "rows", "no classes", "pandas"],
)
def test_missing_pictures_tables_and_packages_are_refused(
    show, hidden, message, monkeypatch
):
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)

    with pytest.raises(OptionError, match=message):
        show(classified())


@pytest.mark.parametrize("value", [0, 1])
def test_curves_that_are_not_defined_are_left_out(value):
    output, y = random(94, 5), torch.full((5,), value)

    evaluation = evaluation_of(output, y, BinaryMetrics(), classes=["no", "yes"])

    axes = axes_of(evaluation.plot("roc"))["ROC"]
    assert axes.get_legend() is None
    assert len(axes.lines) == 1  # that of chance
    rest = ["yes", "no"][value]
    assert f"No label is {rest}, so ROC AUC is undefined" in str(evaluation)
