"""What users have of daskdl, seen from outside: it changes on purpose only.

The public names and how they are called are in `interface`, a stub for each public
package. In these ``...`` is a default of any value, order counts for arguments that may
be passed by position, and methods are those that users call or override.
"""

import inspect
from pathlib import Path

import pytest
from torch import nn

import daskdl
import daskdl.data
import daskdl.keras
import daskdl.metrics
import daskdl.sklearn
from daskdl.channel.protocol import WaitCause
from daskdl.history import COLUMNS, STEP_COLUMNS
from tests.support.problems import rows, trainer

HERE = Path(__file__).parent
PACKAGES = {
    p.__name__: p
    for p in (daskdl, daskdl.data, daskdl.keras, daskdl.metrics, daskdl.sklearn)
}


def stubs_of(package):
    """What the stub of a package defines, by name."""
    path = HERE / "interface" / f"{package.split('.')[-1]}.pyi"
    names = {"__name__": package}
    exec(compile(path.read_text(), path, "exec"), names)
    return {k: v for k, v in names.items() if getattr(v, "__module__", "") == package}


STUBS = {package: stubs_of(package) for package in PACKAGES}
CASES = [
    pytest.param(getattr(PACKAGES[package], name, None), stub, id=f"{package}.{name}")
    for package, stubs in STUBS.items()
    for name, stub in stubs.items()
]
CLASSES = [case for case in CASES if isinstance(case.values[1], type)]


def by_position(parameters):
    """In order; of those that are passed by name there is none."""
    return [(p.kind, p.name) for p in parameters.values() if p.kind != p.KEYWORD_ONLY]


def assert_called_alike(real, stub):
    own, expected = (
        inspect.signature(function).parameters for function in (real, stub)
    )

    assert by_position(own) == by_position(expected)
    assert own.keys() == expected.keys()
    for name, parameter in expected.items():
        if parameter.default is ...:
            assert own[name].default is not parameter.empty, name
        else:
            assert (name, repr(own[name].default)) == (name, repr(parameter.default))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_these_public_names(package):
    assert set(PACKAGES[package].__all__) - {"__version__"} == set(STUBS[package])


CALLED = [c for c in CASES if c not in CLASSES or "__init__" in vars(c.values[1])]


@pytest.mark.parametrize(("real", "stub"), CALLED)
def test_it_is_called_like_this(real, stub):
    assert_called_alike(real, stub)


METHODS = [
    pytest.param(real, stub, name, id=f"{case.id}.{name}")
    for case in CLASSES
    for real, stub in [case.values]
    for name, value in vars(stub).items()
    if name != "__init__" and isinstance(value, type(rows) | classmethod)
]


@pytest.mark.parametrize(("real", "stub", "name"), METHODS)
def test_a_method_is_called_like_this(real, stub, name):
    assert_called_alike(getattr(real, name), getattr(stub, name))
    method, expected = (getattr(owner, name) for owner in (real, stub))
    assert inspect.ismethod(method) == inspect.ismethod(expected)
    assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(expected)


@pytest.mark.parametrize(("real", "stub"), CLASSES)
def test_a_class_is_a_subclass_of_these(real, stub):
    package = PACKAGES[stub.__module__]

    for base in stub.__bases__:
        own = base.__module__ == stub.__module__
        assert issubclass(real, getattr(package, base.__name__) if own else base)


INTEGERS = {"epoch", "examples", "sent_bytes", "received_bytes", "dense_bytes"}
INTEGERS |= {"replicas", "repeated_pieces", "skipped_examples", "refused_messages"}
INTEGERS |= {"repaired_updates", "withheld", "folds", "step", "replica"}


def type_of(column):
    other = {"waits": dict, "delivered": bool}
    return int if column in INTEGERS else other.get(column, float)


@pytest.mark.parametrize(
    "master",
    [daskdl.GradientSharing, daskdl.ParameterAveraging],
    ids=["sharing", "averaging"],
)
def test_a_fit_has_these_columns_and_attributes(master):
    X, y = rows(count=96)
    own = trainer(False, master=master(replicas_per_worker=2), telemetry_every=1)

    history = own.fit(X, y, epochs=2, batch_size=8, validation=(X, y))

    for row in history:
        assert list(row) == [*COLUMNS, "val_loss", "val_accuracy"]
        assert {k: type(v) for k, v in row.items()} == {k: type_of(k) for k in row}
        assert {"lease", "gather"} <= row["waits"].keys() <= {*WaitCause}
        assert {type(seconds) for seconds in row["waits"].values()} == {float}
    assert "join" in history[0]["waits"]
    assert len(history.steps) == 2 * 96 / 8
    for row in history.steps:
        assert list(row) == list(STEP_COLUMNS)
        kind = {"kind": type(row["kind"])}  # None: nothing was sent
        expected = {k: type_of(k) for k in row} | kind | {"staleness": int}
        assert {k: type(v) for k, v in row.items()} == expected
        assert row["kind"] is None or isinstance(row["kind"], str)
    learned = {n for n in dir(own) if n.endswith("_") and not n.startswith("_")}
    scheduled = {"optimizer_", "scheduler_"}
    named = {"classes_", "feature_names_in_"}
    assert learned == {"model_", "history_"} | named | scheduled
    assert history.stopping is None
    assert set(own.evaluate(X, y)) == {"loss", "accuracy"}


def test_without_classes_there_is_no_accuracy_and_without_data_no_score():
    X, _ = rows(count=96)
    y = X[:, :1]
    own = trainer(False, model=nn.Linear(20, 1), loss=nn.MSELoss())

    with_data = own.fit(X, y, batch_size=8, validation=(X, y))
    without = own.fit(X, y, batch_size=8)

    assert list(with_data[0]) == [*COLUMNS, "val_loss"]
    assert list(without[0]) == list(COLUMNS)
