"""The page of daskdl on Dask's dashboard, and its numbers for Prometheus."""

import asyncio
import logging
import re
import sys
import threading
import urllib.request
from importlib.util import find_spec
from itertools import combinations

import pytest
from torch import nn

from daskdl import Callback
from tests.support.browser import needs_chromium, opened
from tests.support.clusters import cluster_of
from tests.support.problems import mlp, rows, trainer
from tests.support.processes import in_a_fork

X, Y = rows()
WITHIN_S = 90.0
MOST_S = 300  # a browser starts slowly on a busy machine

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
    """The models of the last run, on a page that is opened now."""
    from bokeh.client import pull_session

    session = pull_session(url=address_of(client, "daskdl"))
    try:
        (root,) = session.document.roots
        return root.children[0]
    finally:
        session.close()
        session._loop_until_closed()  # else its socket stays open


def text_of(section):
    from bokeh.models import Div

    return " ".join(div.text for div in section.select({"type": Div}))


def lines_of(section, title):
    """The values of each line of a figure, by the name of the line."""
    (source,) = section.select({"name": title})
    return dict(zip(source.data["name"], source.data["y"], strict=True))


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


class OnPurposeError(Exception):
    """Raised by a callback on the workers."""


class FailOnPurpose(Callback):
    def on_step_end(self, step):
        if step.replica == 1 and step.number == 3:
            raise OnPurposeError("on purpose")


def fit(client, epochs, **options):
    fitted, half = trainer(client, **options), len(X) // 2
    fitted.fit(X, Y, epochs=epochs, batch_size=16, validation=(X[:half], Y[:half]))
    return fitted


@needs_bokeh
@pytest.mark.timeout(MOST_S)
class TestPage:
    def test_it_is_linked_from_the_menu_and_links_back(self, watched):
        assert 'href="daskdl"' in get(watched, "status")
        assert 'href="status"' in get(watched, "daskdl")

    def test_it_has_the_numbers_of_a_fit(self, watched):
        history = fit(watched, epochs=3).history_

        section = newest(watched)
        losses = lines_of(section, "Loss by epoch")
        assert list(losses["all replicas"]) == history.column("loss")
        assert list(losses["validation"]) == history.column("val_loss")
        assert {"replica 0", "replica 1"} <= losses.keys()
        assert len(lines_of(section, "Loss by step")["replica 0"]) > 0
        text = text_of(section)
        assert f"val_loss {history[-1]['val_loss']:,.4g}" in text
        assert "epoch 3 of 3" in text
        assert "the run was closed" in text
        for worker in watched.nthreads():
            assert f"{worker}, joined at" in text
        counts = [int(n.replace(",", "")) for n in re.findall("<td>([0-9,]+)<", text)]
        assert sum(history.column("examples")) in map(sum, combinations(counts, 2))

    def test_a_run_that_fails_says_why(self, watched):
        with pytest.raises(Exception, match="on purpose"):
            fit(watched, epochs=2, callbacks=[FailOnPurpose()])

        text = text_of(newest(watched))
        assert "failed: OnPurposeError: on purpose" in text

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
                    text = await page.until(loss, "Daskdl", within_s=WITHIN_S)
                    colour = await page.value("getComputedStyle(document.body).color")
                    colours.append(colour)
                return text, colours, await page.value(CANVASES)

        text, colours, canvases = asyncio.run(look())
        assert "epoch 2 of 2" in text
        light, dark = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
        assert light < 3 * 64 < 3 * 192 < dark  # of the text
        assert canvases >= 9  # one for each figure

    @needs_chromium
    def test_a_run_appears_on_a_page_that_is_open_and_goes_on(self, watched, tmp_path):
        held = Held(epoch=1)
        options = {"epochs": 3, "callbacks": [held], "model": Appears()}

        async def look():
            async with opened(address_of(watched, "daskdl"), tmp_path) as page:
                before = await page.until("Daskdl", within_s=WITHIN_S)
                assert "Appears" not in before
                fitting = asyncio.create_task(
                    asyncio.to_thread(fit, watched, **options)
                )
                try:
                    during = "Appears", "training for"
                    await page.until(*during, within_s=WITHIN_S)
                finally:
                    held.released.set()
                    await fitting
                after = "Appears", "ended after", "epoch 3 of 3"
                await page.until(*after, within_s=WITHIN_S)

        asyncio.run(look())


class Appears(nn.Sequential):
    """A model with a name of its own on the page."""

    def __init__(self):
        super().__init__(*mlp())


# The number of canvases on the page, those in shadow trees included.
CANVASES = """(() => {
  const count = node => (node.nodeName === "CANVAS" ? 1 : 0)
    + (node.shadowRoot ? count(node.shadowRoot) : 0)
    + [...node.childNodes].reduce((sum, child) => sum + count(child), 0);
  return count(document.body);
})()"""


@needs_prometheus
def test_metrics_have_the_numbers_of_a_fit(watched):
    history = fit(watched, epochs=2).history_

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
    assert ("replicas_failed", 0.0) in values


def without_bokeh():
    """Epochs of two fits, what was logged, and what was imported nevertheless."""
    sys.modules.update(dict.fromkeys(["bokeh", "prometheus_client"]))
    messages, logger = [], logging.getLogger("daskdl")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with cluster_of(1, processes=False) as client:
        epochs = [len(fit(client, epochs=1).history_) for _ in range(2)]
    names = "bokeh.", "prometheus_client."
    return epochs, messages, [name for name in sys.modules if name.startswith(names)]


def test_without_bokeh_a_line_of_the_log_says_so_once_and_the_fit_works():
    epochs, messages, imported = in_a_fork(without_bokeh)

    assert (epochs, imported) == ([1, 1], [])
    (line,) = [line for line in messages if "bokeh is not inst" in line]
    assert "pip install daskdl[dashboard]" in line
