"""Reports and pictures of a history: what is in the file, and how large it is."""

import itertools
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from daskdl import OptionError
from daskdl.observe import report
from daskdl.observe.history import COLUMNS, History, RunRecord, Stopping
from daskdl.observe.report import Line
from daskdl.observe.tables import LayerTable, StepRow
from daskdl.observe.timeline import ACTIVITIES, SPANS, Timeline
from tests.contract.test_history import layer_row

BEGAN = 1_700_000_000.0


class Page(HTMLParser):
    """The parsed page.

    Attributes:
        tables: Rows of cells, by the heading above.
        text: Text by heading, without scripts and styles.
        data: The spans that the script draws.
        tags: Every element and its attributes.
    """

    def __init__(self, text):
        super().__init__()
        self.tables, self.text, self.tags, self.data = {}, {}, [], None
        self._heading, self._open = "", []
        self.feed(text)
        self.close()
        assert self._open == [], "an element is not closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link"):
            self._open.append(tag)
        if tag == "h2":
            self._heading = ""
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])
        if tag in ("td", "th"):
            self.tables[self._heading][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "script" in self._open:
            if self.tags[-1][1].get("id") == "spans":
                self.data = json.loads(data)
        elif self._open[-1:] == ["h2"]:
            self._heading += data
        elif "style" not in self._open:
            self.text[self._heading] = self.text.get(self._heading, "") + data
            if {"td", "th"} & set(self._open):
                self.tables[self._heading][-1][-1] += data


def page_of(history, folder):
    path = folder / "run.html"
    history.report(path)
    return Page(path.read_text())


def row(epoch, **columns):
    usual = dict.fromkeys(COLUMNS, 0) | {"epoch": epoch, "loss": 1 / (epoch + 1)}
    return usual | {"seconds": 2.0, "examples": 100, "sent_bytes": 50} | columns


def spans_of(replicas, count, activities=("compute", "exchange", "data")):
    spans = np.zeros(replicas * count, SPANS)
    spans["replica"] = np.repeat(np.arange(replicas), count)
    spans["start"] = BEGAN + np.tile(np.arange(count), replicas)
    spans["end"] = spans["start"] + 1.0
    for name in activities:
        spans[name] = 1 / len(activities)
    return spans.tobytes()


def full(epochs=3, replicas=2, spans=4):
    history = History([row(epoch) for epoch in range(epochs)])
    history.run = RunRecord(BEGAN, 12.5, {"seed": "7"}, {"torch": "2.0"})
    for replica in range(replicas):
        history.run.join(replica, f"tcp://host:{replica}")
    history.timeline = Timeline(BEGAN)
    history.timeline.extend(spans_of(replicas, spans))
    for replica in range(replicas):
        steps = [
            (n, StepRow(epoch=0, step=n, replica=replica, loss=1 / n))
            for n in range(1, 6)
        ]
        history.steps.extend(steps)
    return history


def test_a_report_has_summary_shares_replicas_epochs_options_and_versions(tmp_path):
    page = page_of(full(), tmp_path)

    summary = dict(page.tables["Summary"])
    assert summary["epochs"] == "3"
    assert summary["seconds"] == "12.5"
    assert summary["loss"] == "0.3333"
    assert summary["examples"] == "300"
    assert summary["sent bytes"] == "150 B"
    assert summary["examples per second"] == "50"
    assert summary["replicas"] == "2"
    shares = {name: rest[:2] for name, *rest in page.tables["Where the time went"]}
    assert shares["compute"] == ["2.667", "33.3 %"]
    assert shares.keys() == {"activity", "compute", "exchange", "data"}
    assert [cells[1] for cells in page.tables["Replicas"][1:]] == [
        "tcp://host:0",
        "tcp://host:1",
    ]
    epochs = page.tables["Epochs"]
    assert epochs[0][:2] == ["epoch", "loss"]
    assert [cells[1] for cells in epochs[1:]] == ["1", "0.5", "0.3333"]
    assert page.tables["Options"] == [["seed", "7"]]
    assert page.tables["Versions"] == [["torch", "2.0"]]
    assert "Error" not in page.tables.keys() | page.text.keys()


def test_the_script_draws_the_spans_of_each_replica(tmp_path):
    data = page_of(full(), tmp_path).data

    assert data["names"] == ["compute", "exchange", "data"]
    assert [timeline_row["replica"] for timeline_row in data["rows"]] == [0, 1]
    assert data["rows"][0]["spans"][2] == [2.0, 3.0, 0, 0.333, 1, 0.333, 2, 0.333]


def lab(color):
    """Lightness, and position from green to red and from blue to yellow."""
    levels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(
        levels > 0.04045, ((levels + 0.055) / 1.055) ** 2.4, levels / 12.92
    )
    matrix = [
        [0.4124, 0.3576, 0.1805],
        [0.2126, 0.7152, 0.0722],
        [0.0193, 0.1192, 0.9505],
    ]
    xyz = matrix @ linear / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_no_two_activities_look_alike(tmp_path):
    history = full(replicas=1)
    history.timeline.extend(spans_of(1, 4, ACTIVITIES))

    data = page_of(history, tmp_path).data

    assert len(data["colors"]) == len(ACTIVITIES)
    for (a, color), (b, other) in itertools.combinations(
        zip(data["names"], data["colors"], strict=True), 2
    ):
        assert np.linalg.norm(lab(color) - lab(other)) > 20, (a, b)


def labels_of(*values, **options):
    """The labels of the y axis of a chart with these values, and its title."""
    chart = report.chart(
        "sent", "epoch", [Line("a", range(len(values)), values)], **options
    )
    return re.findall(r'class="y">([^<]*)<', chart), re.search(
        'aria-label=.([^"]*)', chart
    )[1]


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (1.0, ["0", "0.5", "1", "1.5", "2"]),
        (0.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_constant_values_are_in_the_middle_of_an_axis_from_0(value, labels):
    assert labels_of(value, value, value)[0] == labels


def test_labels_of_an_axis_differ_however_close_its_values_are():
    labels, _ = labels_of(0.99999, 0.999991, 0.999992)

    assert len(set(labels)) == len(labels) >= 4


def test_bytes_have_a_unit(tmp_path):
    assert labels_of(0, 3 * 2**20, unit="B") == (["0", "1", "2", "3"], "sent, MiB")
    assert labels_of(0, 300, unit="B")[1] == "sent, B"
    history = History([row(epoch, sent_bytes=1536 << 10) for epoch in range(2)])
    page = page_of(history, tmp_path)
    assert dict(page.tables["Summary"])["sent bytes"] == "3.00 MiB"
    assert "1.50 MiB" in page.tables["Epochs"][1]
    assert "sent_bytes, MiB" in page.text["Curves"]


def test_checkpoints_are_marked_once_for_all_replicas(tmp_path):
    history = full(replicas=2, spans=0)
    spans = np.frombuffer(spans_of(2, 4), SPANS).copy()
    spans["checkpoint"][[1, 3, 5]] = 0.01  # of replica 1: soon after that of replica 0
    spans["start"][5] += 0.2
    history.timeline.extend(spans.tobytes())

    assert page_of(history, tmp_path).data["checkpoints"] == [1.0, 3.0]


def test_a_lost_replica_has_a_bar_to_the_time_of_its_loss(tmp_path):
    history = full(replicas=1)
    for replica, (joined, left) in {1: (0.5, 7.0), 2: (3.0, None)}.items():
        record = {"worker": "w", "joined": joined, "left": left, "reason": "lost"}
        history.run.replicas[replica] = record

    rows = page_of(history, tmp_path).data["rows"]

    assert [row["replica"] for row in rows] == [0, 1, 2]
    assert rows[1] == {"replica": 1, "joined": 0.5, "left": [7.0, "lost"], "spans": []}
    assert (rows[2]["joined"], rows[2]["left"]) == (3.0, None)


def test_a_report_has_the_error_and_who_left(tmp_path):
    history = full()
    history.run.error = "RunError: <b> is lost\nno replica is left"
    history.run.leave(1, "no heartbeat for 60 s & more")

    page = page_of(history, tmp_path)

    assert page.text["Error"] == history.run.error
    assert page.tables["Replicas"][2][4] == "no heartbeat for 60 s & more"
    assert page.data["rows"][1]["left"][1] == "no heartbeat for 60 s & more"
    assert dict(page.tables["Summary"])["replicas that left"] == "1"


def test_nothing_in_it_is_taken_for_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    history = full()
    history.run.error = evil
    history.run.options = {evil: evil}
    history.run.join(0, evil)
    history.run.leave(0, evil)
    history.stopping = Stopping("loss", "target", evil)
    history.layers = with_layers([evil, "0.weight"]).layers

    page = page_of(history, tmp_path)

    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.data["rows"][0]["left"][1] == evil
    assert page.tables["Options"] == [[evil, evil]]
    assert page.tables["Layers"][1][0] == evil


def with_layers(names, steps=3, **columns):
    history = full()
    history.layers = LayerTable(names)
    history.layers.extend(
        (step, layer_row(10 * step, replica, layer, **columns))
        for replica in range(2)
        for step in range(1, steps + 1)
        for layer in range(len(names))
    )
    return history


def test_layers_have_lines_and_histograms(tmp_path):
    page = page_of(with_layers(["0.weight", "0.bias"], residual=3.0), tmp_path)

    heading, *layers = page.tables["Layers"]
    assert heading[:2] == ["name", "parameter norm"]
    assert [cells[:6] for cells in layers] == [
        [name, "4", "2", "0.5", "0.125", "3"] for name in ("0.weight", "0.bias")
    ]
    assert layers[0][6:] == ["-2 to 4", "-1 to 2", "-0.25 to 0.5"]
    text = page.text["Layers"]
    for title in ("log10 of update norm / parameter norm", "norm of the gradient"):
        assert f"{title} by step 0.weight0.bias" in text
    assert "Step 30 of replica 0:" in text
    bins = [
        attributes for tag, attributes in page.tags if attributes.get("class") == "bins"
    ]
    assert len(bins) == 2 * 3
    assert "Layers" not in page_of(full(), tmp_path).text


def test_a_chart_without_residuals_and_counts_that_are_all_zero_is_left_out(tmp_path):
    page = page_of(with_layers(["a"], update=0.0), tmp_path)

    assert "norm of the residual" not in page.text["Layers"]
    assert "log10" not in page.text["Layers"]
    drawn = [attributes["d"] for tag, attributes in page.tags if tag == "path"]
    assert not any("nan" in path or "inf" in path for path in drawn)


def test_many_layers_have_a_table_of_the_first(tmp_path):
    page = page_of(with_layers([f"{n}.weight" for n in range(300)]), tmp_path)

    assert len(page.tables["Layers"]) == 1 + 200
    assert "Step 30 of replica 0, 200 of 300 layers:" in page.text["Layers"]
    names = [attributes for tag, attributes in page.tags if tag == "title"]
    assert len(names) >= 2 * 300


def test_nothing_is_fetched(tmp_path):
    path = tmp_path / "run.html"
    history = full()
    history.run.replicas = {}  # their addresses look like those of pages
    history.report(path)

    text = path.read_text()

    assert not re.search(r"https?://|//[a-z]|@import|url\(|fetch\(|src=", text)


@pytest.mark.parametrize("history", [History(), History([row(0)])])
def test_a_history_without_a_fit_has_a_report(tmp_path, history):
    page = page_of(history, tmp_path)

    assert dict(page.tables["Summary"])["epochs"] == str(len(history))
    assert page.data is None


def test_values_that_are_not_finite_have_a_place_in_tables_only(tmp_path):
    rows = [row(0, loss=math.nan), row(1, loss=math.inf, threshold=math.nan)]

    page = page_of(History(rows), tmp_path)

    assert [cells[1] for cells in page.tables["Epochs"][1:]] == ["-", "inf"]
    drawn = [attributes["d"] for tag, attributes in page.tags if tag == "path"]
    assert drawn
    assert not any("nan" in path or "inf" in path for path in drawn)


def test_a_long_run_of_many_replicas_has_a_file_of_a_few_megabytes(tmp_path):
    history = full(epochs=10_000, replicas=32, spans=1500)
    for replica in range(32):
        steps = [
            (n, StepRow(epoch=0, step=n, replica=replica, loss=1 / n))
            for n in range(1, 10_001)
        ]
        history.steps.extend(steps)

    page = page_of(history, tmp_path)

    assert (tmp_path / "run.html").stat().st_size < 4e6
    assert len(page.tables["Epochs, 201 of 10000"]) == 1 + 201
    assert len(page.data["rows"]) == 32
    assert (
        sum(len(timeline_row["spans"]) for timeline_row in page.data["rows"]) <= 32_768
    )
    seconds = {name: cells[0] for name, *cells in page.tables["Where the time went"]}
    assert seconds["compute"] == "16,000.000"


@pytest.mark.parametrize("place", ["missing/run.html", "."])
def test_a_path_that_cannot_be_written_is_an_os_error_with_its_name(tmp_path, place):
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        full().report(tmp_path / place)


def test_every_activity_has_a_color(tmp_path):
    history = History([row(0)])
    history.timeline.extend(spans_of(1, 1, tuple(ACTIVITIES)))

    data = page_of(history, tmp_path).data

    assert len(data["names"]) == len(set(data["colors"])) == len(ACTIVITIES)


class TestInNotebooks:
    def test_a_history_shows_its_first_and_last_epochs(self):
        page = Page(History([row(epoch) for epoch in range(40)])._repr_html_())

        first = [cells[0] for cells in page.tables[""]]
        assert first == ["epoch", *"01234", "35", "36", "37", "38", "39"]
        assert "History(40 epochs, last loss 0.025)" in page.text[""]
        assert "no epochs" in Page(History()._repr_html_()).text[""]

    def test_columns_are_drawn_by_epoch(self):
        rows = [row(epoch, val_loss=2.0) for epoch in range(3)]

        figure = History(rows).plot("loss", "density")

        loss, density = figure.axes
        assert [line.get_label() for line in loss.lines] == ["loss", "val_loss"]
        assert loss.lines[0].get_ydata().tolist() == [1, 1 / 2, 1 / 3]
        assert density.get_title() == "density"
        titles = [axes.get_title() for axes in History(rows).plot().axes]
        assert titles == ["loss", "examples_per_s", "density"]

    @pytest.mark.parametrize("column", ["waits", "speed"])
    def test_a_column_without_numbers_is_refused(self, column):
        history = History([row(0, waits={})])

        with pytest.raises(OptionError, match=f"got '{column}'"):
            history.plot(column)

    def test_without_epochs_there_is_nothing_to_draw(self):
        with pytest.raises(OptionError, match="nothing to plot"):
            History().plot()
