"""What users have of daskdl, seen from outside: it changes on purpose only.

The public names and how they are called are in `interface.txt`, which
``python -m tests.contract.test_interface`` writes anew. There ``...`` is a default that
has no short literal. Of methods it has those that users call or override; the name of a
new one is added by hand.
"""

import inspect
import re
import textwrap
from pathlib import Path

import pytest
from torch import nn

import daskdl
import daskdl.data
import daskdl.keras
import daskdl.metrics
import daskdl.sklearn
from daskdl.channel.protocol import WaitCause
from daskdl.observe.history import COLUMNS
from daskdl.observe.tables import STEP_COLUMNS
from tests.support.problems import rows, trainer

SNAPSHOT = Path(__file__).with_name("interface.txt")
PACKAGES = daskdl, daskdl.data, daskdl.keras, daskdl.metrics, daskdl.sklearn
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in PACKAGES
    for name in package.__all__
    if name != "__version__"
}
LITERALS = (str, int, float, tuple, type(None), type(inspect.Parameter.empty))


def call_of(function):
    """The arguments, without annotations."""
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.default
            if isinstance(parameter.default, LITERALS)
            else ...,
        )
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def bases_of(kind):
    """The bases that users can name, with those of private classes."""
    for base in kind.__bases__:
        if base.__module__.startswith("daskdl") and base not in PUBLIC.values():
            yield from bases_of(base)
        else:
            yield base.__name__


def line_of(name):
    """How a class, a function or a method is called."""
    owner, _, method = name.rpartition(".")
    value = PUBLIC[name] if name in PUBLIC else getattr(PUBLIC[owner], method)
    if isinstance(value, type):
        call = "" if issubclass(value, Exception) else call_of(value)
        return f"{name}{call}: {', '.join(bases_of(value))}"
    kinds = {"class method": inspect.ismethod, "coroutine": inspect.iscoroutinefunction}
    kind = "".join(f": {kind}" for kind, is_it in kinds.items() if is_it(value))
    return f"{name}{call_of(value)}{kind}"


def snapshot(names):
    lines = [
        textwrap.fill(line_of(name), 88, subsequent_indent=4 * " ") for name in names
    ]
    return "\n".join(lines) + "\n"


def listed():
    return re.findall(r"^daskdl[\w.]+", SNAPSHOT.read_text(), re.MULTILINE)


def test_public_names_are_called_as_before():
    assert PUBLIC.keys() <= {*listed()}
    assert snapshot(listed()).splitlines() == SNAPSHOT.read_text().splitlines(), (
        "if that is the purpose, run python -m tests.contract.test_interface"
    )


INTEGERS = {"epoch", "examples", "sent_bytes", "received_bytes", "dense_bytes"}
INTEGERS |= {"replicas", "repeated_pieces", "skipped_examples", "refused_messages"}
INTEGERS |= {"repaired_updates", "withheld", "folds", "step", "replica"}


def type_of(column):
    return int if column in INTEGERS else {"waits": dict}.get(column, float)


@pytest.mark.parametrize(
    "master",
    [daskdl.GradientSharing, daskdl.ParameterAveraging],
    ids=["sharing", "averaging"],
)
def test_a_fit_has_these_columns_and_attributes(master):
    X, y = rows(count=96)
    fitted = trainer(False, master=master(replicas_per_worker=2), telemetry_every=1)

    history = fitted.fit(X, y, epochs=2, batch_size=8, validation=(X, y))

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
    learned = {n for n in dir(fitted) if n.endswith("_") and not n.startswith("_")}
    scheduled = {"optimizer_", "scheduler_"}
    named = {"classes_", "feature_names_in_"}
    assert learned == {"model_", "history_"} | named | scheduled
    assert history.stopping is None
    assert set(fitted.evaluate(X, y)) == {"loss", "accuracy"}


def test_without_classes_there_is_no_accuracy_and_without_data_no_score():
    X, _ = rows(count=96)
    y = X[:, :1]
    fitted = trainer(False, model=nn.Linear(20, 1), loss=nn.MSELoss())

    with_data = fitted.fit(X, y, batch_size=8, validation=(X, y))
    without = fitted.fit(X, y, batch_size=8)

    assert list(with_data[0]) == [*COLUMNS, "val_loss"]
    assert list(without[0]) == list(COLUMNS)


if __name__ == "__main__":
    there = [n for n in listed() if n in PUBLIC or n.rpartition(".")[0] in PUBLIC]
    SNAPSHOT.write_text(snapshot(sorted({*there, *PUBLIC})))
