"""The lint of names: what it refuses, and what it leaves alone."""

import ast

import pytest

from tests.names import PACKAGE, findings, problems


@pytest.mark.parametrize(
    "code",
    [
        "own = 1",
        "def f(given): ...",
        "def _made(): ...",
        "def f(*rest): ...",
        "self._first = 1",
        "class A:\n    first: int",
        "for one in (): ...",
        "x = [one for one in ()]",
        "with f() as made: ...",
        "import numpy as other",
        "try: ...\nexcept OSError as then: ...",
        "if (found := f()): ...",
        "match x:\n    case [whole, *more]: ...",
        "def f():\n    both = 1, 2\n    return g(*both)",
    ],
)
def test_names_without_a_role_and_bundles_are_refused(code):
    assert findings(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "first_row = own_residual = 1",
        "x = thing.first",
        "def f(*arguments):\n    return g(*arguments)",
        "def f():\n    pair = 1, 2\n    return g(pair)",
    ],
)
def test_names_with_a_role_are_allowed(code):
    assert not findings(ast.parse(code))


def test_a_class_has_one_module_and_a_private_function_at_most_two(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.py").write_text("def _f(): ...\n")
    (tmp_path / "a.py").write_text("class Same: ...\ndef _g(): ...\ndef _f(): ...\n")
    (tmp_path / "b.py").write_text("class Same: ...\ndef _g(): ...\ndef _f(): ...\n")

    assert problems(tmp_path) == [
        "a.py:1: Same is also defined in b.py",
        "a.py:3: _f is also defined in b.py, c.py",
        "b.py:1: Same is also defined in a.py",
        "b.py:3: _f is also defined in a.py, c.py",
        "c.py:1: _f is also defined in a.py, b.py",
    ]


def test_the_package_has_no_such_names():
    assert problems(PACKAGE) == []
