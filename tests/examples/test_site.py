"""The pages of the documentation are all found, and fit a window and a phone."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.support.browser import needs_chromium, opened

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
WINDOW, PHONE = 1300, 390  # pixels
MOST_IN_A_GROUP = 7
WITHIN_S = 60.0
LIMIT_S = 600  # a browser starts slowly on a busy machine

needs_mkdocs = pytest.mark.skipif(
    find_spec("material") is None, reason="mkdocs-material is missing: daskdl[docs]"
)

# Whether a page is there, and its script has put each table into a box that scrolls.
IS_SHOWN = """document.readyState === "complete" && location.href === %s
  && [...document.querySelectorAll("article table:not([class])")]
    .every(table => table.closest(".md-typeset__scrollwrap"))"""

# What is cut off by the right edge, though no box around it scrolls.
CUT_OFF = """(() => {
  const edge = document.documentElement.clientWidth + 1;
  const scrolls = box => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
  const held = box => box !== null && (scrolls(box) || held(box.parentElement));
  const cut = [...document.querySelectorAll("article, article *")].filter(
    one => one.getBoundingClientRect().right > edge && !held(one.parentElement)
  );
  return cut.map(one => `${one.nodeName}: ${one.textContent.trim().slice(0, 60)}`);
})()"""

SCROLLS_SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"

# Tables that are wider than the column of text, and would scroll in their box.
WIDE_TABLES = """(() => {
  const edge = document.querySelector("article").getBoundingClientRect().right + 1;
  const wide = [...document.querySelectorAll("article table")].filter(
    table => table.getBoundingClientRect().right > edge
  );
  return wide.map(table => `TABLE: ${table.textContent.trim().slice(0, 60)}`);
})()"""


def navigation():
    """The file names of the pages in each group."""
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {
        name: [page for entry in entries for page in entry.values()]
        for group in groups
        for name, entries in group.items()
    }


def test_each_group_of_the_navigation_is_short():
    sizes = {name: len(pages) for name, pages in navigation().items()}

    assert max(sizes.values()) <= MOST_IN_A_GROUP, sizes


def test_each_page_is_in_the_navigation_once():
    pages = [page for group in navigation().values() for page in group]

    assert sorted(pages) == PAGES


def test_the_landing_page_links_to_each_other_page():
    linked = re.findall(r"\]\(([^)#]+\.md)", (DOCS / "index.md").read_text())

    assert {*linked, "index.md"} == {*PAGES}


@needs_chromium
@needs_mkdocs
@pytest.mark.timeout(LIMIT_S)
def test_each_page_fits_a_window_and_a_phone(tmp_path):
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", site],
        capture_output=True,
        text=True,
        timeout=LIMIT_S / 2,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = [*site.rglob("index.html")]
    assert len(pages) == len(PAGES)

    async def look():
        faults = {}
        async with opened("about:blank", tmp_path / "profile") as page:
            for width in (WINDOW, PHONE):
                await page.prefer("light", width=width)
                for path in pages:
                    await show(page, path.as_uri())
                    problems = await page.value(CUT_OFF)
                    if width == WINDOW:
                        problems += await page.value(WIDE_TABLES)
                    if await page.value(SCROLLS_SIDEWAYS):
                        problems.append("the whole page scrolls sideways")
                    if problems:
                        faults[path.parent.name, width] = problems
        return faults

    assert asyncio.run(look()) == {}


async def show(page, url):
    """Go to a page, and wait for its script."""
    await page.ask("Page.navigate", url=url)
    deadline = time.monotonic() + WITHIN_S
    while not await page.value(IS_SHOWN % json.dumps(url)):
        assert time.monotonic() < deadline, url
        await asyncio.sleep(0.05)
