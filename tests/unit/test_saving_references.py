"""Only what says itself that it has a name in a module goes by that name."""

import functools
import sys

import pytest
import torch

from daskdl import OptionError, SaveError
from daskdl.saving.json_values import LONGEST, Trust, reference_to, referred
from tests.support import saves

NAME = __name__


class Outer:
    class Inner:
        pass


def function():
    return 1


@functools.wraps(function)
def wrapping():
    return 2


renamed = saves.layers  # has another name where it is from


@pytest.mark.parametrize("value", [Outer, Outer.Inner, function, torch.nn.Linear])
def test_a_class_or_function_of_a_module_is_found_again(value):
    assert referred(reference_to(value)) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 1, "cannot be imported by that name"),
        (Outer(), "is no class or function"),
        (torch.relu, "is no class or function"),
        (functools.partial(function), "is no class or function"),
        (wrapping, "is something else"),
        (pytest.raises, None),
    ],
    ids=["lambda", "instance", "builtin", "partial", "wraps", "moved"],
)
def test_what_importing_does_not_give_is_refused(value, message):
    if message is None:
        assert "raises" in reference_to(value)
        return
    with pytest.raises(OptionError, match=message):
        reference_to(value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", "standard library"),
        ("subprocess:call", "standard library"),
        ("builtins:eval", "standard library"),
        ("__main__:Net", "script or notebook"),
        ("nowhere.at_all:Net", "cannot be imported: ModuleNotFoundError"),
        (f"{NAME}:Missing", "cannot be imported: AttributeError"),
        (f"{NAME}:renamed", "no class or function of that module"),
        (f"{NAME}:NAME", "no class or function of that module"),
        (f"{NAME}:functools.partial", "no class or function of that module"),
        ("../evil:Net", "cannot be imported by that name"),
        (".evil:Net", "cannot be imported by that name"),
        ("a:b:c", "cannot be imported by that name"),
        ("a" * LONGEST + ":b", "cannot be imported by that name"),
        ("", "cannot be imported by that name"),
    ],
)
def test_a_name_that_no_save_has_is_refused(name, message):
    with pytest.raises(SaveError, match=message):
        referred(name, Trust.of(["nowhere", "os", "__main__"]))


def put_module(folder, name, monkeypatch):
    """A module that can be imported, and leaves a file when it is."""
    (folder / f"{name}.py").write_text(
        "import pathlib\n"
        "pathlib.Path(__file__).with_suffix('.ran').touch()\n"
        "class Net: pass\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return folder / f"{name}.ran"


@pytest.mark.parametrize("trusted", [[], ["booby.more"], ["boo"]])
def test_a_module_that_nobody_imported_is_not_imported(tmp_path, monkeypatch, trusted):
    ran = put_module(tmp_path, "booby", monkeypatch)

    with pytest.raises(OptionError, match=r"not imported here; .*trusted=\['booby'\]"):
        referred("booby:Net", Trust.of(trusted))

    assert not ran.exists()
    assert "booby" not in sys.modules


def test_a_module_that_is_trusted_is_imported(tmp_path, monkeypatch):
    ran = put_module(tmp_path, "sound", monkeypatch)

    assert referred("sound:Net", Trust.of(["sound"])).__name__ == "Net"
    assert ran.exists()
