"""The hooks around a fit: whose turn it is, and which error comes out."""

import pytest

from daskdl.callbacks import Callback, FitBegin
from daskdl.history import History
from daskdl.training.fit import callback_scope

FIT = FitBegin(2, 3, 0, 32, 1000, 650)
HISTORY = History()


class Noting(Callback):
    """Writes down what it is told; may raise when it is."""

    def __init__(self, name, seen, begin=None, end=None):
        self.name, self.seen, self.begin, self.end = name, seen, begin, end

    def __repr__(self):
        return f"Noting({self.name})"

    def on_fit_begin(self, fit):
        self.seen.append((self.name, fit))
        if self.begin is not None:
            raise self.begin

    def on_fit_end(self, end):
        assert end.history is HISTORY
        self.seen.append((self.name, end.error))
        if self.end is not None:
            raise self.end


def test_the_end_comes_in_reverse_order():
    seen = []

    with callback_scope([Noting("a", seen), Noting("b", seen)], FIT, HISTORY):
        seen.append("fit")

    assert seen == [("a", FIT), ("b", FIT), "fit", ("b", None), ("a", None)]


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()], ids=repr)
def test_all_are_told_what_ended_it_early(error):
    seen = []

    with (
        pytest.raises(type(error)) as caught,
        callback_scope([Noting("a", seen), Noting("b", seen)], FIT, HISTORY),
    ):
        raise error

    assert caught.value is error
    assert seen[2:] == [("b", error), ("a", error)]


def test_what_a_beginning_raises_comes_out_and_those_before_are_told():
    seen, error = [], RuntimeError("no room")
    callbacks = [Noting("a", seen), Noting("b", seen, begin=error), Noting("c", seen)]

    with (
        pytest.raises(RuntimeError, match="no room"),
        callback_scope(callbacks, FIT, HISTORY),
    ):
        seen.append("never")

    assert seen == [("a", FIT), ("b", FIT), ("a", error)]


def test_what_an_end_raises_comes_out_if_it_is_the_first():
    seen, error = [], RuntimeError("no room")

    with (
        pytest.raises(RuntimeError, match="no room"),
        callback_scope([Noting("a", seen), Noting("b", seen, end=error)], FIT, HISTORY),
    ):
        pass

    assert seen[2:] == [("b", None), ("a", error)]


def test_what_an_end_raises_does_not_hide_the_first_error(caplog):
    seen, error = [], ValueError("lost")
    callbacks = [Noting("a", seen), Noting("b", seen, end=RuntimeError("no room"))]

    with (
        pytest.raises(ValueError, match="lost") as caught,
        callback_scope(callbacks, FIT, HISTORY),
    ):
        raise error

    (note,) = caught.value.__notes__
    assert note.startswith("on_fit_end of Noting(b) failed as well:\nTraceback")
    assert "raise self.end" in note  # the very line
    assert note.endswith("RuntimeError: no room\n")
    assert "lost" not in note
    assert seen[2:] == [("b", error), ("a", error)]
    assert "on_fit_end of Noting(b) failed: RuntimeError('no room')" in caplog.text
