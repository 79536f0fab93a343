"""Pictures of an evaluation: what is drawn, and that nothing hides anything."""

import io
import itertools
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch

from daskdl.errors import OptionError
from daskdl.evaluation.report import Evaluation
from daskdl.metrics import (
    BinaryMetrics,
    CalibrationMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.metric_parts import classes, random, section_of

Y = torch.tensor([0, 0, 1, 2, 2])
SCORES = torch.tensor([[3.0, 0, 1], [0, 2, 1], [0, 3, 1], [0, 1, 3], [1, 0, 4]])
NAMES = ["_cat", "a very long name of a dog", "$owl$"]
KINDS = ["confusion_matrix", "roc", "precision_recall", "reliability"]


def evaluation_of(output, y, *metrics, **facts):
    sections = [section_of(one, output, y, **facts) for one in metrics]
    return Evaluation({"loss": 0.5}, sections)


@pytest.fixture
def three():
    metrics = ClassificationMetrics(), CalibrationMetrics(5)
    return evaluation_of(SCORES, Y, *metrics, classes=NAMES)


def many(count):
    y = classes(90, 60 * count, count)
    scores = random(91, len(y), count) + 2 * torch.nn.functional.one_hot(y, count)
    return evaluation_of(scores, y, ClassificationMetrics(), CalibrationMetrics())


def drawn(figure):
    """Draw it as a file would be written."""
    figure.savefig(io.BytesIO(), format="png")
    return figure


def axes_of(figure, title):
    (axes,) = [a for a in figure.findobj(mpl.axes.Axes) if a.get_title() == title]
    return axes


def test_all_that_there_is_is_drawn(three):
    figure = drawn(three.plot())

    titles = {axes.get_title() for axes in figure.findobj(mpl.axes.Axes)}
    assert titles == {
        *("Confusion matrix", "ROC", "Precision and recall", "Reliability"),
        "",  # the colour bar, and how many predictions there are
    }


@pytest.mark.parametrize("kind", KINDS)
def test_one_picture_is_drawn(three, kind):
    figure = drawn(three.plot(kind))

    titled = [a for a in figure.findobj(mpl.axes.Axes) if a.get_title()]
    assert len(titled) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_axes_are_named(three, kind):
    figure = three.plot(kind)

    for axes in figure.findobj(mpl.axes.Axes):
        shares = axes.get_shared_x_axes().get_siblings(axes)
        below = min(shares, key=lambda a: a.get_position().y0)
        is_bar = axes.get_label() == "<colorbar>"
        assert axes.get_ylabel()
        assert below.get_xlabel() or is_bar


def test_a_confusion_matrix_has_its_counts_in_its_cells(three):
    axes = axes_of(three.plot("confusion_matrix"), "Confusion matrix")

    counts = {t.get_position(): t.get_text() for t in axes.texts}
    assert counts == {(0, 0): "1", (1, 0): "1", (1, 1): "1", (2, 2): "2"}
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(shares, [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "actual")


def test_counts_are_readable_on_every_colour(three):
    axes = axes_of(three.plot("confusion_matrix"), "Confusion matrix")
    image = axes.images[0]

    for text in axes.texts:
        column, row = map(int, text.get_position())
        red, green, blue, _ = image.cmap(image.norm(image.get_array()[row, column]))
        behind = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        ink = 1.0 if text.get_color() == "white" else 0.0
        assert abs(ink - behind) > 0.4


def test_names_are_written_as_they_are_and_cut(three):
    axes = axes_of(three.plot("confusion_matrix"), "Confusion matrix")

    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["_cat", "a very long…", r"\$owl\$"]


@pytest.mark.parametrize("kind", ["roc", "precision_recall"])
def test_curves_are_those_of_the_evaluation(three, kind):
    figure = three.plot(kind)

    (axes,) = figure.findobj(mpl.axes.Axes)
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
    for line, curve in zip(curves, three[f"{kind}_curves"], strict=True):
        np.testing.assert_array_equal(line.get_xydata().T, curve)


def test_each_curve_is_named_with_its_area(three):
    figure = three.plot("roc")

    (axes,) = figure.findobj(mpl.axes.Axes)
    texts = [t.get_text().replace("\u200b", "") for t in axes.get_legend().get_texts()]
    areas = three["roc_auc_per_class"]
    assert texts == [
        f"_cat (AUC {areas[0]:.3f})",
        f"a very long n… (AUC {areas[1]:.3f})",
        rf"\$owl\$ (AUC {areas[2]:.3f})",
    ]


def test_colours_and_dashes_tell_all_named_curves_apart():
    figure = many(10).plot("roc")

    (axes,) = figure.findobj(mpl.axes.Axes)
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert len(set(looks)) == len(looks) == 11  # and that of chance


def test_of_many_classes_the_lowest_curves_are_named():
    evaluation = many(30)

    figure = evaluation.plot("precision_recall")

    (axes,) = figure.findobj(mpl.axes.Axes)
    named = [t.get_text().split()[0] for t in axes.get_legend().get_texts()]
    lowest = np.argsort(evaluation["average_precision_per_class"])[:10]
    assert sorted(map(int, named)) == sorted(lowest)
    assert len(axes.lines) == 30


def test_of_many_classes_the_matrix_has_no_counts_and_few_ticks():
    axes = axes_of(many(30).plot("confusion_matrix"), "Confusion matrix")

    assert list(axes.texts) == []
    assert len(axes.get_xticks()) <= 10


def test_bars_are_the_bins(three):
    figure = three.plot("reliability")

    above, below = figure.findobj(mpl.axes.Axes)
    there = three["bin_count"] > 0
    heights = [bar.get_height() for bar in above.patches]
    np.testing.assert_allclose(heights, three["bin_accuracy"][there])
    starts = [bar.get_x() for bar in above.patches]
    np.testing.assert_allclose(starts, three["bin_edges"][:-1][there])
    assert [bar.get_height() for bar in below.patches] == three["bin_count"].tolist()


@pytest.mark.parametrize("count", [3, 30])
def test_nothing_lies_over_anything_else(count):
    figure = drawn(many(count).plot())

    boxes = []
    for axes in figure.findobj(mpl.axes.Axes):
        boxes.append(axes.get_tightbbox(for_layout_only=True))
        if axes.get_legend():
            boxes.append(axes.get_legend().get_window_extent())
            # Beside the axes, not over the curves.
            assert not axes.get_legend().get_window_extent().overlaps(axes.bbox)
            boxes[-2] = axes.bbox
    whole = figure.bbox
    for i, box in enumerate(boxes):
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1 + 1
        assert [j for j in range(i) if box.overlaps(boxes[j])] == []


@pytest.mark.parametrize("count", [3, 30, 1000])
def test_names_at_an_axis_do_not_run_into_each_other(count):
    y = torch.arange(count)
    scores = torch.nn.functional.one_hot(y, count).float()
    evaluation = evaluation_of(scores, y, ClassificationMetrics(thresholds=2))

    figure = drawn(evaluation.plot("confusion_matrix"))

    axes = axes_of(figure, "Confusion matrix")
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        for one, two in itertools.pairwise(boxes):
            assert not one.overlaps(two)


def test_a_label_that_is_there_or_not_has_its_pictures():
    output = torch.tensor([-1.0, 2.0, 1.0, -2.0])
    y = torch.tensor([0, 1, 0, 0])

    figure = evaluation_of(output, y, BinaryMetrics(), CalibrationMetrics()).plot()

    roc = axes_of(figure, "ROC")
    assert [t.get_text() for t in roc.get_legend().get_texts()] == ["1 (AUC 1.000)"]


def test_labels_have_curves_and_no_matrix():
    output, y = random(92, 9, 3), classes(93, 27, 2).reshape(3, 9).T

    with pytest.raises(OptionError, match="one of 'roc', 'precision_recall', which"):
        evaluation_of(output, y, MultilabelMetrics()).plot("confusion_matrix")


@pytest.mark.parametrize("value", [0, 1])
def test_curves_that_are_not_defined_are_left_out(value):
    output, y = random(94, 5), torch.full((5,), value)

    figure = drawn(evaluation_of(output, y, BinaryMetrics()).plot("roc"))

    (axes,) = figure.findobj(mpl.axes.Axes)
    assert axes.get_legend() is None
    assert len(axes.lines) == 1  # that of chance


def test_nothing_to_draw_is_said():
    output, y = random(95, 5), random(96, 5)

    with pytest.raises(OptionError, match="nothing to draw in this evaluation"):
        evaluation_of(output, y, RegressionMetrics()).plot()


def test_pictures_need_matplotlib(three, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(OptionError, match=r"pip install daskdl\[plots\]"):
        three.plot()


def test_nothing_of_pyplot_is_used(three):
    before = sys.modules.pop("matplotlib.pyplot", None)

    drawn(three.plot())

    assert "matplotlib.pyplot" not in sys.modules
    if before is not None:
        sys.modules["matplotlib.pyplot"] = before
