"""The parts of ``make test-part`` are what ``make test-all`` adds to ``make test``."""

import re
import tomllib
from fnmatch import filter as matching
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.parts import PARTS, part_of

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")]


def kept(items, part):
    """Items that are left when pytest is run with ``--part``, or without it."""
    deselected = []
    config = SimpleNamespace(
        getoption={"part": part}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)),
    )
    items = list(items)
    conftest.pytest_collection_modifyitems(config, items)
    return items, deselected


@pytest.fixture
def items():
    """One test of each file, and a doctest."""
    ids = [f"{path}::test_it[1-tests/cluster]" for path in FILES]
    ids.append("daskdl/losses.py::daskdl.losses")
    return [
        SimpleNamespace(
            nodeid=node_id,
            path=ROOT / node_id.partition("::")[0],
            add_marker=lambda marker: None,
        )
        for node_id in ids
    ]


def test_each_test_is_in_one_part_and_no_test_is_lost(items):
    everything, _ = kept(items, None)
    parts = [kept(items, part) for part in PARTS]

    assert len(everything) == len(items)
    together = [item.nodeid for chosen, _ in parts for item in chosen]
    assert sorted(together) == sorted(item.nodeid for item in items)
    assert all(len(chosen) + len(rest) == len(items) for chosen, rest in parts)


def test_a_test_is_in_the_first_part_that_has_its_file():
    assert part_of("tests/examples/test_site.py::test_links[docs/*]") == 1
    assert part_of("tests/cluster/test_new.py::test_examples") == max(PARTS)


def test_each_pattern_of_a_part_has_files_that_no_earlier_part_has():
    for part, patterns in PARTS.items():
        here = [path for path in FILES if part_of(path) == part]
        assert [pattern for pattern in patterns if not matching(here, pattern)] == []


def test_make_test_and_test_all_and_the_parts_divide_the_same_markers():
    makefile = (ROOT / "Makefile").read_text()
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    (apart,) = re.findall(r"^APART := (.*)$", makefile, re.M)

    assert f"-m 'not ({apart} or jobqueue)'" in options["ini_options"]["addopts"]
    assert '-m "$(APART)"\n' in makefile
    assert '-m "$(APART)" --part $(N)\n' in makefile
    numbers = " ".join(map(str, PARTS))
    assert f"\n{numbers}: ; @:\n" in makefile


@pytest.mark.parametrize(
    ("marker", "folders"),
    [
        ("cuda", {"cuda", "maths"}),
        ("learning", {"learning", "chaos", "network"}),
        ("", {Path(path).parts[1] for path in FILES}),
        ("slow or cuda", {Path(path).parts[1] for path in FILES}),
    ],
)
def test_the_marker_of_a_folder_leaves_files_without_it_unread(marker, folders):
    config = SimpleNamespace(option=SimpleNamespace(markexpr=marker))

    read = [
        Path(path).parts[1]
        for path in FILES
        if not conftest.pytest_ignore_collect(ROOT / path, config)
    ]

    assert {*read} == folders
    if marker == "learning":
        assert read.count("network") == 1
