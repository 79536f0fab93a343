"""The catalogue of mutations applies to the code as it is; what is said of each."""

import ast
import re
from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import Mutation, catalogue, chosen, outcome

ROOT = Path(__file__).parents[2]


def test_each_mutation_changes_one_place_and_leaves_python():
    wrong = []
    for number, mutation in enumerate(catalogue()):
        text = (ROOT / mutation.file).read_text()
        if (count := text.count(mutation.old)) != 1 or mutation.new == mutation.old:
            wrong.append(f"{number}: {mutation.file} has {count} x {mutation.old!r}")
            continue
        ast.parse(text.replace(mutation.old, mutation.new), f"mutation {number}")
    assert wrong == []


def test_each_mutation_names_tests_that_exist():
    unknown = [
        (number, test)
        for number, mutation in enumerate(catalogue())
        for test in mutation.tests
        if not exists(test)
    ]
    assert unknown == []
    assert all(mutation.tests and mutation.why for mutation in catalogue())


def exists(test):
    path, *names = re.sub(r"\[.*", "", test).split("::")
    text = (ROOT / path).read_text()
    return all(re.search(rf"\b(def|class) {name}\b", text) for name in names)


def test_no_mutation_is_listed_twice():
    listed = [(mutation.file, mutation.old, mutation.new) for mutation in catalogue()]

    assert len(listed) == len(set(listed))


def test_mutations_are_chosen_by_number_file_test_or_reason():
    first = Mutation(
        "daskdl/a.py", "x", "y", ["tests/test_a.py::test_b"], "a row is lost"
    )
    second = Mutation(
        "daskdl/c.py", "x", "y", ["tests/test_c.py::test_d"], "a row is new"
    )

    assert [*chosen([first, second], [])] == [0, 1]
    assert [*chosen([first, second], ["1"])] == [1]
    assert [*chosen([first, second], ["a.py", "test_d"])] == [0, 1]
    assert [*chosen([first, second], ["lost"])] == [0]


@pytest.fixture
def tree(tmp_path):
    """A tree with two lines of code, of which one is tested."""
    root = tmp_path / "tree"
    root.mkdir()
    (root / "numbers_of.py").write_text("ONE = 1\nTWO = 2\n")
    test = "from numbers_of import ONE\n\n\ndef test_one():\n    assert ONE == 1\n"
    (root / "test_numbers.py").write_text(test)
    return root


@pytest.mark.parametrize(
    ("old", "new", "end"),
    [
        ("ONE = 1", "ONE = 3", "found"),
        ("TWO = 2", "TWO = 3", "survived"),
        ("ONE = 1", "", "pytest ended with 4: "),  # nothing could be tested
    ],
    ids=["found", "survived", "not imported"],
)
def test_only_a_failing_test_finds_a_mutation(tree, monkeypatch, old, new, end):
    monkeypatch.setattr(mutations, "OPTIONS", ("-q", "-p", "no:cacheprovider"))
    mutation = Mutation("numbers_of.py", old, new, ["test_numbers.py::test_one"], "-")

    assert outcome(mutation, tree).startswith(end)
    assert (tree / "numbers_of.py").read_text() == "ONE = 1\nTWO = 2\n"


def test_a_mutation_of_two_places_is_no_mutation(tree):
    mutation = Mutation("numbers_of.py", " = ", " - ", ["test_numbers.py"], "-")

    assert outcome(mutation, tree) == "numbers_of.py has 2 times ' = '"
