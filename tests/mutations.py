"""Faults that the tests have to find, each a change of a few lines in one file.

``python -m tests.mutations`` makes each change in a copy of the tree, runs the tests
that the catalogue names for it, and prints the mutations that no test has found. The
catalogue is ``mutations.toml`` beside this file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CATALOGUE = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 300  # of one test; a mutation that makes it hang is found
OPTIONS = ("-q", "-m", "", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT_S))
PASSED, FAILED = 0, 1  # exit codes of pytest


class Mutation(NamedTuple):
    """A change of one file.

    Attributes:
        file: Path from the root of the tree.
        old: Text that occurs once in the file.
        new: What replaces it.
        tests: Node ids, of which at least one has to fail.
        why: What the change breaks.
    """

    file: str
    old: str
    new: str
    tests: Sequence[str]
    why: str

    def apply(self, root: Path) -> None:
        """Change the file in a tree.

        Raises:
            ValueError: If `old` does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} times {self.old!r}")
        path.write_text(text.replace(self.old, self.new))


def catalogue(path: Path = CATALOGUE) -> list[Mutation]:
    """Read all mutations."""
    return [Mutation(**entry) for entry in tomllib.loads(path.read_text())["mutation"]]


def copy_of_tree(source: Path, target: Path) -> None:
    """Copy the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=source, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def run_tests(root: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run tests of a tree; return the exit code and what pytest has printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def outcome(mutation: Mutation, tree: Path) -> str:
    """Make a change in a copy of a tree: "found", "survived", or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(shutil.copytree(tree, Path(folder) / "tree"))
        try:
            mutation.apply(root)
        except ValueError as error:
            return str(error)
        if "numba" in mutation.new or "numba" in (root / mutation.file).read_text():
            for cached in root.rglob("*.nb[ci]"):  # may contain functions of this file
                cached.unlink()
        code, output = run_tests(root, mutation.tests, "-x")
    if code in (PASSED, FAILED):
        return "found" if code == FAILED else "survived"
    return f"pytest ended with {code}: {' '.join(output.split())[-300:]}"


def chosen(mutations: Sequence[Mutation], words: Sequence[str]) -> dict[int, Mutation]:
    """Choose mutations by number, or by text in their file, tests or reason."""

    def fits(number: int, mutation: Mutation) -> bool:
        text = " ".join((mutation.file, *mutation.tests, mutation.why))
        return any(
            number == int(word) if word.isdigit() else word in text for word in words
        )

    numbered = dict(enumerate(mutations))
    return {n: m for n, m in numbered.items() if not words or fits(n, m)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a mutation was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument(
        "which", nargs="*", help="numbers, or parts of a file, test or reason"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE)
    options = parser.parse_args(arguments)
    mutations = chosen(catalogue(options.catalogue), options.which)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder)
        copy_of_tree(ROOT, tree)
        tests = dict.fromkeys(test for m in mutations.values() for test in m.tests)
        # Each has to pass on the code as it is; this run also fills the caches of
        # compiled code that the copies inherit.
        code, output = run_tests(tree, [*tests], "-n", str(options.jobs))
        if code != PASSED:
            print(output)
            print("these tests fail without a mutation")
            return 1
        survived = []
        with ThreadPoolExecutor(options.jobs) as pool:
            ends = pool.map(lambda m: outcome(m, tree), mutations.values())
            for (number, mutation), end in zip(mutations.items(), ends, strict=True):
                print(f"{number} {mutation.file}: {mutation.why}: {end}", flush=True)
                survived += [number] * (end != "found")
    killed = len(mutations) - len(survived)
    print(f"{killed} of {len(mutations)} mutations were found; others: {survived}")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
