"""What an evaluation gives back: a dict, a report, tables, JSON."""

import copy
import json
import pickle
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from daskdl.errors import OptionError
from daskdl.evaluation.report import Evaluation, user_metrics
from daskdl.metrics import (
    BinaryMetrics,
    CalibrationMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.metric_parts import classes, random, section_of

BEST = torch.tensor([0, 0, 1, 0])
SCORES = 9 * torch.nn.functional.one_hot(BEST, 4).float() - torch.arange(4) / 10
CLASSES = torch.tensor([0, 0, 1, 2])
NAMES = ["cat", "dog", "owl", "yak"]


def classified(**facts):
    return section_of(ClassificationMetrics(), SCORES, CLASSES, **facts)


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

Without a label and never predicted, left out of every mean: yak

Confusion matrix (row: actual, column: predicted):

     cat  dog  owl  yak
cat    2    0    0    0
dog    0    1    0    0
owl    1    0    0    0
yak    0    0    0    0"""


def test_the_report_on_classes():
    evaluation = Evaluation({"loss": 0.25}, [classified(classes=NAMES)])

    assert str(evaluation) == repr(evaluation) == CLASS_REPORT


def test_the_report_on_binary_labels():
    output, y = torch.tensor([-1.0, 2.0, 1.0, -2.0]), torch.tensor([0, 1, 0, 0])

    evaluation = Evaluation((), [section_of(BinaryMetrics(), output, y)])

    assert (
        str(evaluation)
        == """\
Binary: 4 labels, 1 of them 1

accuracy           0.7500
precision          0.5000
recall             1.0000
specificity        0.6667
F1                 0.6667
MCC                0.5774
ROC AUC            1.0000
average precision  1.0000

Confusion matrix (row: actual, column: predicted):

   0  1
0  2  1
1  0  1"""
    )


def test_the_report_on_one_class_says_what_is_not_defined():
    output, y = torch.tensor([-1.0, 2.0]), torch.tensor([False, False])

    section = section_of(BinaryMetrics(), output, y, classes=["no", "yes"])

    report = str(Evaluation((), [section]))
    assert "ROC AUC                 -\n" in report
    assert "\n\nNo label is yes: ROC AUC is not defined\n\n" in report


def test_the_report_on_many_labels():
    output = torch.tensor([[1.0, -1.0], [1.0, -2.0], [-1.0, -3.0]])
    y = torch.tensor([[1, 0], [0, 0], [0, 0]])

    section = section_of(MultilabelMetrics(), output, y, classes=["red", "wide"])

    assert (
        str(Evaluation((), [section]))
        == """\
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

Without a label and never predicted, left out of every mean: wide"""
    )


def test_the_report_on_numbers():
    output = torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    y = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])

    section = section_of(RegressionMetrics(), output, y)

    assert (
        str(Evaluation({"loss": 1.0}, [section]))
        == """\
loss  1.0000

Regression: 2 columns, 6 values

column     MSE     MAE    RMSE       R2  Pearson  values
0       0.3333  0.3333  0.5774   0.5000   0.9820       3
1       1.6667  1.0000  1.2910  -1.5000        -       3
mean    1.0000  0.6667  0.9342  -0.5000   0.9820       6

Pearson is not defined where labels or predictions do not vary: 1"""
    )


def test_the_report_on_calibration():
    output, y = torch.tensor([0.2, 0.9, 0.8]), torch.tensor([0, 1, 0])

    section = section_of(CalibrationMetrics(3), output, y, scale="probabilities")

    assert (
        str(Evaluation((), [section]))
        == """\
Calibration: 3 predictions

expected calibration error  0.3000
largest calibration error   0.3500

confidence      count  mean confidence  accuracy
0.000 to 0.333      1           0.2000    0.0000
0.333 to 0.667      0                -         -
0.667 to 1.000      2           0.8500    0.5000"""
    )


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
def test_names_that_the_user_gives_come_before_those_of_the_data(metrics, y):
    section = section_of(metrics, torch.eye(2) + 0.5, y, classes=["other", "names"])

    assert section.names == ("a", "b")


def test_metrics_of_the_users_own_are_told_by_name():
    section = user_metrics({"MeanAbsoluteError": 0.5, "rows": 3, "of": np.arange(2)})

    report = str(Evaluation({"loss": 0.25}, [section]))

    assert (
        report
        == """\
loss  0.2500

Metrics

MeanAbsoluteError  0.5000
rows                    3
of                  [0 1]"""
    )


def many(count):
    y = classes(80, 400, count)
    return section_of(
        ClassificationMetrics(),
        random(81, 400, count) + torch.nn.functional.one_hot(y, count),
        y,
    )


def test_up_to_20_classes_are_all_told():
    report = str(Evaluation((), [many(20)]))

    assert "Confusion matrix" in report
    assert "lowest" not in report
    assert report.count("\n19 ") == 2  # in the table, and in the matrix


def test_of_more_classes_those_with_the_lowest_f1_are_told():
    section = many(21)

    report = str(Evaluation((), [section]))

    assert "Confusion matrix" not in report
    table = report.split("The 10 classes with the lowest F1, of those with labels:")[1]
    told = [int(line.split()[0]) for line in table.strip().splitlines()[1:11]]
    f1 = section.values["f1_per_class"]
    assert sorted(f1[told]) == sorted(f1)[:10]


def test_names_cannot_break_the_report():
    names = ["a\nb\x1b[31m", "a name that is far too long", "c", "d"]

    report = str(Evaluation((), [classified(classes=names)]))

    assert "\x1b" not in report
    assert "a b [31m" in report
    assert " a name th… " in report  # above its column


class Text(HTMLParser):
    """Collects tags and what is between them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_a_notebook_shows_tables_and_names_as_they_are():
    names = ["<script>alert(1)</script>", '"&', "c", "d"]

    page = Text(Evaluation({"loss": 0.25}, [classified(classes=names)])._repr_html_())

    assert set(page.tags) == {"div", "h4", "p", "table", "tr", "th", "td"}
    assert page.texts.count("<script>alert(1)</script>") == 2  # both tables' rows
    assert page.texts.count('"&') >= 2
    assert "0.7500" in page.texts


def test_without_metrics_it_is_a_dict_and_looks_like_one():
    evaluation = Evaluation({"loss": 0.5, "accuracy": 0.25})

    assert evaluation == {"loss": 0.5, "accuracy": 0.25}
    assert repr(evaluation) == str(evaluation) == "{'loss': 0.5, 'accuracy': 0.25}"
    assert evaluation._repr_html_() is None
    assert json.dumps(evaluation) == '{"loss": 0.5, "accuracy": 0.25}'


def test_json_is_read_back_as_the_values():
    evaluation = Evaluation({"loss": float("inf")}, [classified()])

    read = json.loads(evaluation.to_json())

    assert read.keys() == evaluation.keys()
    assert read["loss"] is None
    assert read["roc_auc_per_class"][3] is None  # of a class without labels
    assert read["confusion_matrix"] == evaluation["confusion_matrix"].tolist()
    assert read["f1"] == evaluation["f1"]


def test_a_dict_of_plain_values_has_no_arrays():
    plain = Evaluation({"of": {"a": np.float64(1)}}, [classified()]).to_dict()

    assert plain["of"] == {"a": 1.0}
    assert type(plain["of"]["a"]) is float
    assert plain["support"] == [2, 1, 1, 0]
    assert {type(n) for n in plain["support"]} == {int}


def test_two_sets_may_have_values_of_the_same_name():
    y = torch.tensor([0, 1, 1])
    output = torch.tensor([[2.0, 1.0], [1.0, 2.0], [2.0, 1.0]])
    sections = [
        section_of(ClassificationMetrics(), output, y),
        section_of(BinaryMetrics(), output, y),
    ]

    evaluation = Evaluation({"loss": 0.5}, sections)

    assert evaluation["precision"] == 0.75  # the mean of 1 / 2 and 1
    assert evaluation["binary_precision"] == 1.0
    assert evaluation["specificity"] == 1.0


def test_a_table_has_a_row_for_each_class():
    sections = [
        classified(classes=NAMES),
        section_of(CalibrationMetrics(), SCORES, CLASSES, classes=NAMES),
    ]

    table = Evaluation({"loss": 0.25}, sections).to_pandas()

    assert list(table.index) == NAMES
    assert table["support"].tolist() == [2, 1, 1, 0]
    assert table.loc["dog", "f1_per_class"] == 1.0
    assert "ece_per_class" in table


def test_a_table_is_of_one_kind_of_classes():
    sections = [
        classified(classes=NAMES),
        section_of(CalibrationMetrics(), SCORES, CLASSES, classes=["other", "names"]),
    ]

    table = Evaluation({"loss": 0.25}, sections).to_pandas()

    assert list(table.index) == NAMES
    assert "ece_per_class" not in table


def test_a_table_of_all_has_one_row():
    table = Evaluation({"loss": 0.25}, [classified()]).to_pandas("all")

    assert len(table) == 1
    assert table.loc[0, "loss"] == 0.25
    assert table.loc[0, "accuracy"] == 0.75
    assert "support" not in table


def test_without_classes_a_table_has_one_row():
    table = Evaluation({"loss": 0.5, "accuracy": 0.25}).to_pandas()

    assert table.to_dict("records") == [{"loss": 0.5, "accuracy": 0.25}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("columns", 'must be "classes", "all" or None, got \'columns\''),
        ("classes", "there are no classes in this evaluation"),
    ],
)
def test_a_table_that_there_is_not_is_refused(rows, message):
    with pytest.raises(OptionError, match=message):
        Evaluation({"loss": 0.5}).to_pandas(rows)


def test_a_table_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(OptionError, match=r"pip install daskdl\[dataframe\]"):
        Evaluation({"loss": 0.5}).to_pandas()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_it_can_be_copied_and_sent(copied):
    evaluation = Evaluation({"loss": 0.25}, [classified(classes=NAMES)])

    again = copied(evaluation)

    assert str(again) == CLASS_REPORT
    assert again.to_json() == evaluation.to_json()
