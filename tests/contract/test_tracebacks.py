"""Tracebacks show the user's frames, and daskdl's only where daskdl has a fault."""

import pathlib
import traceback

import numpy as np
import pytest
from torch import nn

import daskdl
from daskdl.errors import hide_internal_frames_

X, Y = np.zeros((8, 2), np.float32), np.zeros(8, np.int64)


@pytest.fixture(autouse=True)
def short():
    """Whatever a command with --traceback has left in this process."""
    daskdl.errors.keep_internal_frames(False)


class Failing(nn.Linear):
    def __init__(self, last=0):
        super().__init__(2, 2)
        self.last, self.calls = last, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > self.last:
            raise ValueError("mine")
        return super().forward(x)


def trainer(model=None, **options):
    model = Failing() if model is None else model
    return daskdl.Trainer(
        model, "cross_entropy", "sgd", lr=0.1, client=False, **options
    )


class Torn(list):
    def __getitem__(self, index):
        raise ValueError("torn")


FAILURES = {
    "option": lambda: trainer(seed=-1),
    "data": lambda: trainer(nn.Linear(2, 2)).fit(X, Y[:3]),
    "dry run": lambda: trainer().fit(X, Y),
    "step": lambda: trainer(Failing(3)).fit(X, Y, batch_size=1),
    "predict": lambda: daskdl.predict(Failing(), X, client=False),
    "evaluate": lambda: daskdl.evaluate(Failing(), X, Y, client=False),
    "before a fit": lambda: trainer().predict(X),
}


def functions(trace):
    """Files and functions of a traceback, outermost first."""
    return [(pathlib.Path(f.filename), f.name) for f in traceback.extract_tb(trace)]


@pytest.mark.parametrize("name", FAILURES)
def test_only_frames_of_the_user_are_left(name):
    with pytest.raises(daskdl.DaskDLError) as caught:
        FAILURES[name]()

    package = pathlib.Path(daskdl.__file__).parent
    error, last = caught.value, None
    while error is not None:
        files = [file for file, _ in functions(error.__traceback__)]
        assert not [file for file in files if package in file.parents]
        if files:
            last = functions(error.__traceback__)[-1]
        error = error.__cause__
    if name in ("dry run", "predict", "evaluate"):
        assert last == (pathlib.Path(__file__), "forward")
    if name == "step":
        assert 'test_tracebacks.py", line' in str(caught.value)
        assert str(package) not in str(caught.value)


def test_tracebacks_are_complete_on_request():
    daskdl.errors.keep_internal_frames()
    try:
        with pytest.raises(daskdl.ModelError) as caught:
            trainer().fit(X, Y)
    finally:
        daskdl.errors.keep_internal_frames(False)

    assert "dry_run" in [name for _, name in functions(caught.value.__traceback__)]


@pytest.mark.parametrize("internal", [True, False])
def test_a_fault_of_daskdl_keeps_its_frames(internal):
    file = daskdl.__file__ if internal else "user.py"
    scope = {}
    exec(compile("def inner():\n    return 1 / 0", file, "exec"), scope)
    exec(compile("def outer():\n    inner()", daskdl.__file__, "exec"), scope)

    with pytest.raises(ZeroDivisionError) as caught:
        scope["outer"]()
    hide_internal_frames_(caught.value)

    names = [name for _, name in functions(caught.value.__traceback__)]
    assert ("outer" in names) is internal
    assert names[-1] == "inner"
