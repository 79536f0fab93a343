"""The page of daskdl on Dask's dashboard, and its numbers for Prometheus."""

import asyncio
import base64
import json
import logging
import re
import socket
import struct
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from distributed.utils_test import poll_for
from torch import nn

from daskdl import Callback, DaskDLError, util
from daskdl.config import VERSION
from tests.support.browser import needs_chromium, opened
from tests.support.clusters import cluster_of
from tests.support.problems import mlp, rows, trainer
from tests.support.processes import in_a_fork

X, Y = rows()
WITHIN_S = 90.0
TIMEOUT_S = 300  # a browser starts slowly on a busy machine

needs_bokeh = pytest.mark.skipif(
    find_spec("bokeh") is None, reason="bokeh is not installed: daskdl[dashboard]"
)
needs_prometheus = pytest.mark.skipif(
    find_spec("prometheus_client") is None,
    reason="prometheus_client is not installed: daskdl[dashboard]",
)


@pytest.fixture(scope="module")
def watched():
    """A client of two workers, whose scheduler has loaded the plugin."""
    preloaded = {"preload": "daskdl.channel.scheduler"}
    with cluster_of(2, processes=False, scheduler_kwargs=preloaded) as client:
        yield client


def address_of(client, path):
    port = client.scheduler_info()["services"]["dashboard"]
    return f"http://127.0.0.1:{port}/{path}"


def get(client, path):
    with urllib.request.urlopen(address_of(client, path), timeout=WITHIN_S) as answer:
        return answer.read().decode()


def newest(client):
    """The head of the last run, and what its open section has."""
    head = json.loads(get(client, "daskdl/runs"))["runs"][0]
    return head, json.loads(get(client, f"daskdl/runs/{head['id']}"))


def lines_of(section, title):
    """The values of each curve of a figure, by the name of the curve."""
    (figure,) = [figure for figure in section["figures"] if figure["title"] == title]
    return {
        curve["name"]: np.frombuffer(
            base64.b64decode(section["arrays"][curve["y"]]), "<f4"
        )
        for curve in figure["curves"]
    }


class Held(Callback):
    """On the client: lets the end of an epoch wait until the test has looked.

    Args:
        epoch: The epoch.
    """

    def __init__(self, epoch):
        self._epoch = epoch
        self.released = threading.Event()

    def on_epoch_end(self, row):
        if row["epoch"] == self._epoch:
            assert self.released.wait(WITHIN_S)


IMPORTED = threading.Event()


async def imported_late():
    """The versions in this process, once a test lets them be found."""
    assert await asyncio.to_thread(IMPORTED.wait, WITHIN_S)
    return {"daskdl": VERSION, "torch": torch.__version__, "error": ""}


class OnPurposeError(Exception):
    """Raised by a callback on the workers."""


class FailOnPurpose(Callback):
    def on_step_end(self, step):
        if step.replica == 1 and step.number == 3:
            raise OnPurposeError("on purpose")


class Interrupt(Callback):
    """On the client: as Ctrl-C would."""

    def on_epoch_end(self, row):
        raise KeyboardInterrupt


def fit(client, epochs, name=None, **options):
    fitted, half = trainer(client, **options), len(X) // 2
    held_out = X[:half], Y[:half]
    fitted.fit(X, Y, epochs=epochs, batch_size=16, validation=held_out, name=name)
    return fitted


@pytest.mark.timeout(TIMEOUT_S)
class TestPage:
    @needs_bokeh
    def test_it_is_linked_from_the_menu_and_links_back(self, watched):
        assert 'href="daskdl"' in get(watched, "status")
        assert 'href="status"' in get(watched, "daskdl")

    def test_it_has_the_numbers_of_a_fit(self, watched):
        history = fit(watched, epochs=3, name="deep <1>").history_

        head, section = newest(watched)
        losses = lines_of(section, "Loss by epoch")
        assert losses["all replicas"].tolist() == pytest.approx(history.column("loss"))
        assert losses["validation"].tolist() == pytest.approx(
            history.column("val_loss")
        )
        assert {"replica 0", "replica 1"} <= losses.keys()
        accuracies = lines_of(section, "accuracy")
        assert accuracies["validation"].tolist() == pytest.approx(
            history.column("val_accuracy")
        )
        assert len(lines_of(section, "Loss by step")["replica 0"]) > 0
        assert (head["name"], head["id"]) == ("deep <1>", history.run.id)
        assert (head["phase"], head["why"]) == ("finished", "")
        assert head["numbers"][0] == "epoch 2 (3 of 3)"
        assert f"val_loss {history[-1]['val_loss']:,.4g}" in head["numbers"]
        cells = [replica["cells"] for replica in section["replicas"]]
        for worker in watched.nthreads():
            assert any(row[-1].startswith(f"{worker}, joined at") for row in cells)
        column = section["columns"].index("examples")
        counts = [int(row[column].replace(",", "")) for row in cells]
        assert sum(counts) == sum(history.column("examples"))

    def test_a_run_that_fails_says_why(self, watched):
        with pytest.raises(Exception, match="on purpose"):
            fit(watched, epochs=2, callbacks=[FailOnPurpose()])

        head, _ = newest(watched)
        assert head["phase"] == "failed"
        assert head["why"] == "replica 1 failed: OnPurposeError: on purpose"

    def test_a_run_that_its_client_stops_says_so(self, watched):
        with pytest.raises(KeyboardInterrupt):
            fit(watched, epochs=2, callbacks=[Interrupt()])

        head, _ = newest(watched)
        assert head["phase"] == "stopped"
        assert head["why"] == "the client stopped it: KeyboardInterrupt"

    def test_a_fit_is_announced_while_workers_import(self, watched, monkeypatch):
        heads = []

        def look():
            heads[:] = json.loads(get(watched, "daskdl/runs"))["runs"]
            return heads[0]["state"] == "starting: importing torch on 2 of 2 workers"

        monkeypatch.setattr(util, "version_finder", lambda: imported_late)
        IMPORTED.clear()
        options = {"epochs": 1, "name": "slow"}
        fitting = threading.Thread(target=fit, args=(watched,), kwargs=options)
        fitting.start()
        try:
            poll_for(look, WITHIN_S)
        finally:
            IMPORTED.set()
            fitting.join()

        assert heads[0]["name"] == "slow"
        head, _ = newest(watched)
        assert (head["id"], head["phase"]) == (heads[0]["id"], "finished")

    def test_a_fit_that_is_refused_is_announced_no_more(self, watched):
        labels = np.full(len(X), 99)

        with pytest.raises(DaskDLError):
            trainer(watched).fit(X, labels, name="refused")

        def gone():
            heads = json.loads(get(watched, "daskdl/runs"))["runs"]
            return "refused" not in {head["name"] for head in heads}

        poll_for(gone, WITHIN_S)

    def test_a_tab_that_leaves_early_leaves_no_message(self, watched, caplog):
        fit(watched, epochs=1)
        host, _, port = address_of(watched, "").split("/")[2].partition(":")
        run = newest(watched)[0]["id"]

        for path in ("daskdl", "daskdl/runs", f"daskdl/runs/{run}", "daskdl/runs/0"):
            for _ in range(5):
                with socket.create_connection((host, int(port))) as tab:
                    reset = struct.pack("ii", 1, 0)
                    tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    tab.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        newest(watched)  # the requests before have been answered

        messages = [
            r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING
        ]
        # Clients of other tests refresh what they know of their schedulers.
        assert [m for m in messages if "Client._update_scheduler_info" not in m] == []

    @pytest.mark.slow
    @needs_chromium
    def test_a_browser_shows_it_in_the_scheme_that_it_prefers(self, watched, tmp_path):
        history = fit(watched, epochs=2).history_
        loss = f"val_loss {history[-1]['val_loss']:,.4g}"

        async def look():
            async with opened(address_of(watched, "daskdl"), tmp_path) as page:
                colours = []
                for scheme in ("light", "dark"):
                    await page.prefer(scheme)
                    text = await page.until(loss, "daskdl", within_s=WITHIN_S)
                    colour = await page.value("getComputedStyle(document.body).color")
                    colours.append(colour)
                return text, colours

        text, colours = asyncio.run(look())
        assert "epoch 1 (2 of 2)" in text
        light, dark = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
        assert light < 3 * 64 < 3 * 192 < dark  # of the text

    @pytest.mark.parametrize("width", [1300, 900, 400])
    @needs_chromium
    def test_nothing_is_cut_off_or_covered(self, watched, tmp_path, width):
        history = fit(watched, epochs=3, name="deep").history_
        address = address_of(watched, f"daskdl#run-{history.run.id}")

        async def look():
            async with opened(address, tmp_path) as page:
                await page.prefer("light", width=width)
                await page.until("Loss by epoch", "accuracy", within_s=WITHIN_S)
                return await page.value(OVERLAPS)

        seen = asyncio.run(look())
        assert seen["figures"] >= 9
        assert (seen["overlaps"], seen["wider"], seen["cut"]) == ([], 0, [])

    @needs_chromium
    def test_a_run_appears_on_a_page_that_is_open_and_goes_on(self, watched, tmp_path):
        held = Held(epoch=1)
        options = {"epochs": 3, "callbacks": [held], "model": Appears()}
        fit(watched, epochs=1, name="before")

        async def look():
            async with opened(address_of(watched, "daskdl"), tmp_path) as page:
                before = await page.until("before", within_s=WITHIN_S)
                assert "Appears" not in before
                assert await page.value(OPEN) == []  # ended runs are a line each
                fitting = asyncio.create_task(
                    asyncio.to_thread(fit, watched, **options)
                )
                try:
                    during = "Appears", "training for", "Loss by step"
                    await page.until(*during, within_s=WITHIN_S)
                    (name,) = await page.value(OPEN)
                    assert name.startswith("Appears ")
                finally:
                    held.released.set()
                    await fitting
                after = "Appears", "finished after", "epoch 2 (3 of 3)"
                await page.until(*after, within_s=WITHIN_S)
                fetched = await page.value(FETCHED)
                assert len(fetched) == 1  # no section but the open one

        asyncio.run(look())


# Values of a curve, and the labels of its axis.
AXES = {
    "bytes": (np.geomspace(900, 2e5), ["1 kiB", "10 kiB", "100 kiB"]),
    "many bytes": (np.geomspace(3, 5e9), ["1 kiB", "1 MiB", "1 GiB"]),
    "alike": (np.linspace(2e6, 4e6), ["2 MiB", "2.5 MiB", "3 MiB", "3.5 MiB"]),
    "steps": (np.linspace(1.2e6, 1.203e6, 50), ["1,200,000", "1,201,000", "1,202,000",
                                                "1,203,000"]),
    "losses": (np.geomspace(0.002, 2), ["0.01", "0.1", "1"]),
}  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    """Answers as the scheduler would, of a run with `AXES` as its figures."""

    def do_GET(self):
        head = {
            **dict.fromkeys(("name", "title", "state", "why"), "axes"),
            **{"id": "a", "phase": "training", "version": "1", "numbers": []},
            "ended": None,
        }
        curves = [np.arange(50.0), *(values for values, _ in AXES.values())]
        section = {
            "version": "1",
            "last": "",
            "columns": [],
            "replicas": [],
            "arrays": [
                base64.b64encode(values.astype("<f4").tobytes()).decode()
                for values in curves
            ],
            "figures": [
                {
                    "title": title,
                    "x": "seconds",
                    "unit": "" if title in ("steps", "losses") else "B",
                    "curves": [
                        {"name": "c", "color": "red", "width": 1, "x": 0, "y": i}
                    ],
                }
                for i, title in enumerate(AXES, 1)
            ],
        }
        content = {
            "/daskdl": resources.files("daskdl.channel").joinpath("dashboard.html"),
            "/daskdl/runs": {"now": 0, "runs": [head]},
            "/daskdl/runs/a": section,
        }[self.path]
        self.send_response(200)
        self.end_headers()
        text = json.dumps(content) if isinstance(content, dict) else content.read_text()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@needs_chromium
@pytest.mark.timeout(TIMEOUT_S)
def test_an_axis_has_round_labels_that_fit(tmp_path):
    async def look(address):
        async with opened(address, tmp_path) as page:
            await page.until(*AXES, within_s=WITHIN_S)
            return await page.value(LABELS), await page.value(OVERLAPS)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        labels, seen = asyncio.run(
            look(f"http://127.0.0.1:{server.server_port}/daskdl")
        )
        server.shutdown()
        answering.join()

    assert labels == {title: expected for title, (_, expected) in AXES.items()}
    assert seen["cut"] == []


class Appears(nn.Sequential):
    """A model with a name of its own on the page."""

    def __init__(self):
        super().__init__(*mlp())


# Labels of the vertical axis of each figure, by its title.
LABELS = """Object.fromEntries([...document.querySelectorAll("svg")].map(svg => [
  svg.getAttribute("aria-label"),
  [...svg.querySelectorAll("text.y")].map(label => label.textContent),
]))"""
# Names of the runs whose sections are open.
OPEN = """[...document.querySelectorAll("details[open] strong")]
  .map(name => name.textContent)"""
# Paths of the sections that the page has asked for.
FETCHED = """[...new Set(performance.getEntriesByType("resource")
  .map(entry => new URL(entry.name).pathname)
  .filter(path => path.startsWith("/daskdl/runs/")))]"""
# Pairs of figures that overlap, pixels by which the page is wider than its window, and
# labels that are cut off.
OVERLAPS = """(() => {
  const figures = [...document.querySelectorAll("figure")];
  const boxes = figures.map(figure => figure.getBoundingClientRect());
  const overlaps = [];
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [boxes[i], boxes[j]];
    if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
      overlaps.push([i, j]);
  }
  const root = document.documentElement;
  const wider = Math.max(0, root.scrollWidth - innerWidth);
  const labels = [...document.querySelectorAll("svg text")].filter(text => {
    const label = text.getBoundingClientRect();
    const box = text.closest("svg").getBoundingClientRect();
    return label.left < box.left || label.right > box.right;
  });
  const cut = labels.map(label => label.textContent);
  return {figures: figures.length, overlaps, wider, cut};
})()"""


@needs_prometheus
def test_metrics_have_the_numbers_of_a_fit(watched):
    history = fit(watched, epochs=2, name='deep "1"').history_

    lines = get(watched, "metrics").splitlines()
    matches = [re.fullmatch(r"dask_daskdl_(\w+)\{(.*)\} (\S+)", line) for line in lines]
    samples = [match.groups() for match in matches if match]
    last = repr(history[-1]["val_loss"])
    (run,) = {
        re.search(r'run="(\w+)"', labels)[1]
        for name, labels, value in samples
        if name == "score" and 'score="val_loss"' in labels and value == last
    }
    values = [(name, float(value)) for name, labels, value in samples if run in labels]
    for total in ("examples", "sent_bytes", "received_bytes"):
        counted = sum(value for name, value in values if name == f"{total}_total")
        assert counted == sum(history.column(total)), total
    assert ("epoch", 1.0) in values
    assert ("replicas_failed_total", 0.0) in values
    names = {labels.partition('name="')[2] for _, labels, _ in samples if run in labels}
    assert all(name.startswith('deep \\"1\\""') for name in names)


def without_bokeh():
    """The page and the numbers of a fit, and what was imported nevertheless."""
    sys.modules.update(dict.fromkeys(["bokeh", "prometheus_client"]))
    with cluster_of(1, processes=False) as client:
        epochs = len(fit(client, epochs=1).history_)
        page_url = util.dashboard_page(client)
        with urllib.request.urlopen(page_url, timeout=WITHIN_S) as answer:
            page = answer.read().decode()
        head, _ = newest(client)
    names = "bokeh.", "prometheus_client."
    imported = [name for name in sys.modules if name.startswith(names)]
    return epochs, page[:15], head["phase"], imported


def test_the_page_needs_neither_bokeh_nor_prometheus():
    assert in_a_fork(without_bokeh) == (1, "<!DOCTYPE html>", "finished", [])
