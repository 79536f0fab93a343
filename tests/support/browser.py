"""A headless browser, driven by its own protocol; and what a page shows in it."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request

import pytest
from tornado.websocket import websocket_connect

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium on PATH: apt-get install chromium"
)
STARTS_S = 60
ANSWERS_S = 30

# Text of the page, also of the shadow trees in which bokeh puts its models.
TEXT = """(() => {
  const parts = [];
  const visit = node => {
    if (node.nodeType === Node.TEXT_NODE) parts.push(node.textContent);
    if (["STYLE", "SCRIPT"].includes(node.nodeName)) return;
    if (node.shadowRoot) visit(node.shadowRoot);
    node.childNodes.forEach(visit);
  };
  if (document.body) visit(document.body);
  return parts.join(" ").replace(/\\s+/g, " ");
})()"""


class Page:
    """One page in a browser.

    Args:
        socket: Connection to the browser's protocol.
    """

    def __init__(self, socket):
        self._socket = socket
        self._number = 0

    async def ask(self, method, **parameters):
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        await self._socket.write_message(json.dumps(request))
        while True:
            answer = json.loads(await self._socket.read_message())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    async def value(self, expression):
        """The value of an expression in the page."""
        answer = await self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, *texts, within_s=60.0):
        """Wait until the page has all these texts; return the whole text."""
        deadline = time.monotonic() + within_s
        while True:
            text = await self.value(TEXT)
            if all(expected in text for expected in texts):
                return text
            assert time.monotonic() < deadline, (texts, text)
            await asyncio.sleep(0.2)

    async def prefer(self, scheme, width=1300, height=1400):
        """Let the browser prefer a "light" or "dark" scheme, and have a size."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.ask("Emulation.setEmulatedMedia", features=[feature])
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )


@contextlib.asynccontextmanager
async def opened(url, folder):
    """Open a page in a new browser.

    Args:
        url: Of the page.
        folder: For the profile of the browser.
    """
    process = subprocess.Popen(  # noqa: ASYNC220  # it is over with the page
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort", process)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT"
        )
        target = json.loads(await asyncio.to_thread(_read, request))
        socket = await websocket_connect(
            target["webSocketDebuggerUrl"], max_message_size=2**28
        )
        try:
            page = Page(socket)
            await page.ask("Page.navigate", url=url)
            yield page
        finally:
            socket.close()
            while await socket.read_message() is not None:
                pass  # until it is closed
    finally:
        process.terminate()
        process.wait(ANSWERS_S)


def _read(request):
    with urllib.request.urlopen(request, timeout=ANSWERS_S) as answer:
        return answer.read()


async def _port(path, process):
    deadline = time.monotonic() + STARTS_S
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, "the browser has ended"
        assert time.monotonic() < deadline, "the browser did not start"
        await asyncio.sleep(0.1)
    return int(path.read_text().split()[0])
