"""Version, changelog, documentation and packages agree: what a release needs."""

import re
import runpy
import shutil

import pytest

from tests.release import (
    CLOSING,
    ROOT,
    URLS,
    disagreements,
    missing_or_added,
    unfinished,
)

PLACE = "https://example.org/daskdl"


@pytest.fixture
def tree(tmp_path):
    """A copy of what is compared, ready to be released."""
    for path in ("pyproject.toml", "CHANGELOG.md", "README.md", "mkdocs.yml"):
        shutil.copy(ROOT / path, tmp_path)
    for path in ("daskdl/config.py", "daskdl/codec/frame.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    no_images = shutil.ignore_patterns("images")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=no_images)

    urls = "\n".join(f'{name} = "{PLACE}"' for name in URLS)
    table = "[project.urls]\n"
    replace(tmp_path / "pyproject.toml", re.escape(table), f"{table}{urls}\n")
    replace(tmp_path / "mkdocs.yml", r"\A", f"repo_url: {PLACE}\n")
    replace(tmp_path / "CHANGELOG.md", r"^(## \d\S*), .+$", r"\1, 2026-12-01")
    for page in tmp_path.rglob("*.md"):
        page.write_text(re.sub(r"[Uu]ntil \S+ is released", "Now", page.read_text()))
    return tmp_path


def replace(file, pattern, replacement):
    """Change the text of a file where it first has a pattern."""
    text, changed = re.subn(
        pattern, replacement, file.read_text(), count=1, flags=re.MULTILINE
    )
    assert changed, (file, pattern)
    file.write_text(text)


def test_version_changelog_and_documentation_agree():
    assert [*disagreements(ROOT)] == []


def test_a_tree_that_is_ready_has_nothing_left_to_do(tree):
    assert [*disagreements(tree), *unfinished(tree)] == []


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "told"),
    [
        ("daskdl/config.py", "^VERSION = .+", 'VERSION = "9.0.0"', "VERSION is 9.0.0"),
        ("CHANGELOG.md", r"^## \d\S*, ", "## 9.0.0, ", "the newest is 9.0.0"),
        ("CHANGELOG.md", "^Wire version 1.", "Wire version 9.", "Wire version 1."),
        ("docs/wire-format.md", r"version 1$", "version 9", "say: version 1"),
        ("docs/command-line.md", r"has daskdl \S+", "has daskdl 9.0.0", "daskdl 9.0.0"),
        ("mkdocs.yml", "^repo_url: .+", "repo_url: http://a.b", "repo_url is http://a.b"),
        ("mkdocs.yml", "^repo_url: .+", "", "repo_url is None"),
    ],
)  # fmt: skip
def test_a_version_or_address_that_differs_is_named(
    tree, file, pattern, replacement, told
):
    replace(tree / file, pattern, replacement)

    (point,) = disagreements(tree)

    assert point.startswith(file)
    assert told in point


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "told"),
    [
        ("pyproject.toml", "^Issues = .+", "", "[project.urls] has no Issues"),
        ("CHANGELOG.md", r"^(## \d\S*), .+", r"\1, soon", "has no date, but 'soon'"),
        ("README.md", r"\A", "Until 0.9 is released, wait.\n", ":1: Until 0.9 is"),
    ],
)
def test_what_a_release_lacks_is_named(tree, file, pattern, replacement, told):
    replace(tree / file, pattern, replacement)

    (point,) = unfinished(tree)

    assert point.startswith(file)
    assert told in point


def test_files_that_a_package_lacks_or_adds_are_named():
    files = {"a.py", "b.py"}

    assert [*missing_or_added("wheel", files, files)] == []
    assert [*missing_or_added("wheel", files, {"b.py", "c.py"})] == [
        "the wheel lacks c.py",
        "the wheel has, but the last commit has not, a.py",
    ]


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("[a](docs/a.md#b)", "/blob/v1.0/docs/a.md#b"),
        ("[`a`](LICENSE)", "/blob/v1.0/LICENSE"),
        ("![a](docs/images/a.png)", "/raw/v1.0/docs/images/a.png"),
        ('<img src="docs/a.svg">', "/raw/v1.0/docs/a.svg"),
        ("[b](#b)", None),
        ("[b](https://a.org/b.md)", None),
    ],
)
def test_relative_links_of_the_readme_lead_to_the_repository(link, target):
    complete = runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"]

    changed = complete(link, f"{PLACE}/", "1.0")

    relative = re.search(r"docs/[^)\"]+|LICENSE", link)
    expected = link.replace(relative[0], PLACE + target) if target else link
    assert changed == expected


@pytest.mark.parametrize(
    "line",
    [
        "====== 7224 passed, 3 skipped in 344.12s (0:05:44) ======",
        "=== 1 failed, 2 passed in 3.10s ===",
        "1000 seeds without a violation in 93 s, 2 processes",
    ],
)
def test_closing_lines_are_those_of_pytest_and_of_the_simulation(line):
    assert CLOSING.fullmatch(line)
    assert not CLOSING.fullmatch(f"{line} and more")
