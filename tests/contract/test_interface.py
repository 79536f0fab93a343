"""What users have of daskdl, seen from outside: it changes on purpose only.

The public names and how they are called are in `interface`, a stub for each public
package. In these ``...`` is a default of any value, order counts for arguments that may
be passed by position, and methods are those that users call or override.
"""

import inspect
import re
from pathlib import Path

import dask.config
import pytest
from torch import nn

import daskdl
import daskdl.data
import daskdl.keras
import daskdl.metrics
from tests.support.problems import rows, trainer

HERE = Path(__file__).parent
PACKAGES = {p.__name__: p for p in (daskdl, daskdl.data, daskdl.keras, daskdl.metrics)}


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


@pytest.mark.parametrize(
    ("real", "stub"), [c for c in CASES if not isinstance(c.values[1], type)]
)
def test_a_function_is_called_like_this(real, stub):
    assert_called_alike(real, stub)


@pytest.mark.parametrize(
    ("real", "stub"), [c for c in CLASSES if "__init__" in vars(c.values[1])]
)
def test_a_class_is_made_like_this(real, stub):
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


def test_the_configuration_has_these_names():
    names = dask.config.get("daskdl")

    assert names.keys() == {"timeouts", "export"}
    bounds = {"join", "request", "silence", "stop", "rejoin", "data"}
    assert names["timeouts"].keys() == bounds
    assert names["export"].keys() == {"url", "storage_options"}


COLUMNS = {
    "epoch": int,
    "loss": float,
    "examples": int,
    "seconds": float,
    "examples_per_s": float,
    "density": float,
    "threshold": float,
    "learning_rate": float,
    "sent_bytes": int,
    "received_bytes": int,
    "dense_bytes": int,
    "staleness": float,
    "waits": dict,
    "clipped": float,
    "replicas": int,
    "repeated_pieces": int,
    "skipped_examples": int,
    "refused_messages": int,
    "repaired_updates": int,
    "withheld": int,
    "folds": int,
}
CAUSES = {
    "staleness",
    "room",
    "lease",
    "gather",
    "fetch",
    "flush",
    "updates",
    "checkpoint",
    "data",
    "missing",
    "repair",
    "join",
    "snapshot",
    "activate",
}
STEP_COLUMNS = {
    "epoch": int,
    "step": int,
    "replica": int,
    "loss": float,
    "learning_rate": float,
    "threshold": float,
    "density": float,
    "sent_bytes": int,
    "kind": str,
    "residual_norm": float,
    "residual_p50": float,
    "residual_p90": float,
    "residual_p99": float,
    "staleness": int,
    "wait_s": float,
    "encode_s": float,
    "apply_s": float,
    "step_s": float,
}
MASTERS = {
    "sharing": daskdl.GradientSharing(replicas_per_worker=2),
    "averaging": daskdl.ParameterAveraging(replicas_per_worker=2),
}


@pytest.fixture(scope="module", params=MASTERS)
def fitted(request):
    X, y = rows(count=96)
    own = trainer(False, master=MASTERS[request.param], telemetry_every=1)
    own.fit(X, y, epochs=2, batch_size=8, validation=(X, y))
    return own


class TestAFit:
    def test_a_row_of_the_history_has_these_columns_of_these_types(self, fitted):
        scores = {"val_loss": float, "val_accuracy": float}

        for row in fitted.history_:
            assert {k: type(v) for k, v in row.items()} == COLUMNS | scores
            assert list(row) == [*COLUMNS, *scores]

    def test_waits_are_seconds_by_cause(self, fitted):
        waits = [row["waits"] for row in fitted.history_]

        assert set().union(*waits) <= CAUSES
        assert set().union(*waits) >= {"join", "lease", "gather"}
        assert {type(s) for each in waits for s in each.values()} == {float}

    def test_a_row_of_the_steps_has_these_columns_of_these_types(self, fitted):
        steps = list(fitted.history_.steps)

        assert len(steps) == 2 * 96 / 8
        for row in steps:
            types = {k: type(v) for k, v in row.items()}
            if row["kind"] is None:  # nothing was sent
                types["kind"] = str
            assert types == STEP_COLUMNS
            assert list(row) == list(STEP_COLUMNS)

    def test_a_trainer_has_these_attributes_afterwards(self, fitted):
        learned = {n for n in dir(fitted) if n.endswith("_") and not n.startswith("_")}

        scheduled = {"optimizer_", "scheduler_"}
        assert learned == {"model_", "history_", "classes_"} | scheduled

    def test_nothing_has_stopped_it(self, fitted):
        assert fitted.history_.stopping is None

    def test_evaluating_gives_these_scores(self, fitted):
        assert set(fitted.evaluate(*rows(count=96))) == {"loss", "accuracy"}


def test_without_classes_there_is_no_accuracy():
    X, _ = rows(count=96)
    own = trainer(False, model=nn.Linear(20, 1), loss=nn.MSELoss())

    history = own.fit(X, X[:, :1], batch_size=8, validation=(X, X[:, :1]))

    assert list(history[0]) == [*COLUMNS, "val_loss"]


def test_without_validation_data_there_are_no_scores():
    history = trainer(False).fit(*rows(count=96), batch_size=8)

    assert list(history[0]) == list(COLUMNS)


def test_every_cause_of_waiting_is_explained():
    page = (HERE.parents[1] / "docs" / "tuning.md").read_text()
    section = page.split("\n## Waiting\n")[1].split("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == CAUSES
