"""The oldest versions that are allowed are those that `make test-oldest` installs."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, Version]:
    """Versions in a file of constraints, by package."""
    lines = (ROOT / name).read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and line[0] != "#"]
    versions = {}
    for requirement in pinned:
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        versions[canonicalize_name(requirement.name)] = Version(specifier.version)
    assert len(versions) == len(pinned)
    return versions


def requirements(*extras: str) -> list[Requirement]:
    """What daskdl with these extras requires, without itself."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    required = [Requirement(line) for line in lines]
    inner = {e for r in required if r.name == PROJECT["name"] for e in r.extras}
    if not inner <= {*extras}:
        return requirements(*extras, *sorted(inner - {*extras}))
    return [r for r in required if r.name != PROJECT["name"]]


def floor(requirement: Requirement) -> Version:
    (lowest,) = (s.version for s in requirement.specifier if s.operator == ">=")
    return Version(lowest)


OLDEST = pins("constraints-oldest.txt")
TESTED = requirements("test")
EVERY = requirements(*PROJECT["optional-dependencies"])


def test_every_floor_that_the_tests_need_is_pinned_and_nothing_else():
    assert {canonicalize_name(r.name) for r in TESTED} == OLDEST.keys()


@pytest.mark.parametrize("requirement", TESTED, ids=str)
def test_the_oldest_version_that_is_allowed_is_the_one_that_is_tested(requirement):
    assert floor(requirement) == OLDEST[canonicalize_name(requirement.name)]


@pytest.mark.parametrize("requirement", EVERY, ids=str)
def test_every_requirement_allows_the_version_that_the_suite_is_run_with(requirement):
    newest = pins("constraints.txt").get(canonicalize_name(requirement.name))

    assert newest is None or requirement.specifier.contains(newest)
    assert newest is None or newest >= floor(requirement)


def test_the_oldest_python_is_the_one_that_the_makefile_uses():
    (used,) = re.findall(
        r"^PYTHON \?= python(\S+)$", (ROOT / "Makefile").read_text(), re.M
    )

    assert PROJECT["requires-python"] == f">={used}"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_pages_name_the_oldest_versions(page):
    text = (ROOT / page).read_text()
    floors = {r.name: floor(r) for r in EVERY}

    named = {
        name: Version(version)
        for name, version in re.findall(r"\b([a-z-]+) (\d+(?:\.\d+)*)\b", text)
        if name in floors
    }

    assert {"torch", "dask"} <= named.keys()
    assert named == {name: floors[name] for name in named}
