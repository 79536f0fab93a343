"""The pages of the documentation are all found, and fit a window and a phone."""

import asyncio
import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.contract.test_public import PUBLIC
from tests.support.browser import needs_chromium, opened

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
WINDOW, PHONE = 1300, 390  # pixels
MAX_IN_A_GROUP = 7
MAX_BYTES = 250_000
WITHIN_S = 60.0
LIMIT_S = 600  # a browser starts slowly on a busy machine

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material is missing: daskdl[docs]",
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

# Tables that scroll sideways, themselves or in the box around them.
WIDE = """(() => {
  const scrolls = box => box?.scrollWidth > box?.clientWidth;
  const wide = [...document.querySelectorAll("article table")].filter(
    table => %s && [table, table.closest(".md-typeset__scrollwrap")].some(scrolls)
  );
  return wide.map(table => `TABLE: ${table.textContent.trim().slice(0, 60)}`);
})()"""
WIDE_TABLES = WIDE % "true"
WIDE_TABLES_OF_OPTIONS = WIDE % """table.tHead?.textContent.includes("Default")"""


def navigation():
    """The entries of each group: by title, or the page of the group itself."""
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {name: entries for group in groups for name, entries in group.items()}


def links_of(page):
    """The pages, relative to the documentation, that a page links to."""
    linked = re.findall(r"\]\(([^)#:]+\.md)", (DOCS / page).read_text())
    return {os.path.normpath(Path(page).parent / name) for name in linked}


def test_each_group_of_the_navigation_is_short():
    sizes = {
        name: sum(isinstance(entry, dict) for entry in entries)
        for name, entries in navigation().items()
    }

    assert max(sizes.values()) <= MAX_IN_A_GROUP, sizes


def test_each_page_is_in_the_navigation_once():
    entries = [entry for group in navigation().values() for entry in group]
    pages = [
        page
        for entry in entries
        for page in (entry.values() if isinstance(entry, dict) else [entry])
    ]

    assert sorted(pages) == PAGES


def test_the_landing_page_links_to_each_other_page():
    linked = links_of("index.md") | links_of("api/index.md")

    assert linked | {"index.md"} == {*PAGES}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://git.example/daskdl", "its [repository](https://git.example/daskdl):"),
        ("", "its repository:"),
    ],
    ids=["known", "unknown"],
)
def test_the_landing_page_links_to_the_repository_once_it_has_an_address(
    address, expected
):
    hook = runpy.run_path(str(DOCS / "repository.py"))["on_page_markdown"]

    markdown = hook((DOCS / "index.md").read_text(), config={"repo_url": address})

    assert expected in markdown


@needs_mkdocs
def test_a_reader_of_a_page_asks_the_host_of_the_repository_for_nothing():
    hook = runpy.run_path(str(DOCS / "repository.py"))["on_post_page"]
    theme = Path(importlib.util.find_spec("material").origin).parent
    link = (theme / "templates" / "partials" / "source.html").read_text()

    shown = hook(link)

    assert 'class="md-source"' in shown
    assert "data-md-component" not in shown  # what the script of the theme looks for


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the pages as HTML."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder],
        capture_output=True,
        text=True,
        timeout=LIMIT_S / 2,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@needs_mkdocs
@pytest.mark.timeout(LIMIT_S)
def test_each_page_of_the_reference_is_small(site):
    sizes = {
        str(path.relative_to(site)): path.stat().st_size
        for path in site.rglob("index.html")
    }

    assert len(sizes) == len(PAGES)
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


@needs_mkdocs
@pytest.mark.timeout(LIMIT_S)
def test_the_reference_shows_how_to_create_the_classes_that_users_create(site):
    pages = "".join(page.read_text() for page in (site / "api").rglob("index.html"))
    _, *parts = re.split(r'<h\d id="daskdl\.([\w.]+)"', pages)
    classes = {name for name, value in PUBLIC.items() if isinstance(value, type)}

    signed = {
        name
        for name, text in zip(parts[::2], parts[1::2], strict=True)
        if '<div class="doc-signature' in text.partition("<p>")[0]
    }

    created = {n for n in classes if "\nArgs:\n" in inspect.getdoc(PUBLIC[n])}
    assert "Trainer" in created
    assert signed & classes == created


@needs_mkdocs
@pytest.mark.timeout(LIMIT_S)
def test_docstrings_link_to_public_names_methods_and_pages(site):
    trainer = (site / "api" / "trainer" / "index.html").read_text()
    pages = {page: page.read_text() for page in (site / "api").rglob("index.html")}

    links = {
        (page, link)
        for page, text in pages.items()
        for link in re.findall(r'<a[^>]* href="(\.\./[^"#]*)', text)
    }

    for link in ("../callbacks/#daskdl.EarlyStopping", "#daskdl.Trainer.evaluate"):
        assert f'href="{link}"><code>' in trainer, link
    for link in ("../data/", "../models/#daskdlkeras"):
        assert f'<a href="{link}"><code>' in trainer, link
    assert '<a href="../../how-it-works/">how it works</a>' in trainer
    places = {page.parent / link for page, link in links}
    missing = [p for p in places if not (p.is_file() or (p / "index.html").is_file())]
    assert missing == []


@needs_chromium
@needs_mkdocs
@pytest.mark.timeout(LIMIT_S)
def test_each_page_fits_a_window_and_a_phone(site, tmp_path):
    async def look():
        faults = {}
        async with opened("about:blank", tmp_path / "profile") as page:
            for width in (WINDOW, PHONE):
                await page.prefer("light", width=width)
                for path in site.rglob("index.html"):
                    await show(page, path.as_uri())
                    wide = WIDE_TABLES if width == WINDOW else WIDE_TABLES_OF_OPTIONS
                    problems = await page.value(CUT_OFF) + await page.value(wide)
                    if await page.value(SCROLLS_SIDEWAYS):
                        problems.append("the whole page scrolls sideways")
                    if problems:
                        faults[str(path.relative_to(site)), width] = problems
        return faults

    assert asyncio.run(look()) == {}


async def show(page, url):
    """Go to a page, and wait for its script."""
    await page.ask("Page.navigate", url=url)
    deadline = time.monotonic() + WITHIN_S
    while not await page.value(IS_SHOWN % json.dumps(url)):
        assert time.monotonic() < deadline, url
        await asyncio.sleep(0.05)
