"""The record of a fit on threads: its timeline, replicas, options, and report."""

import json
import re
import time

import pytest

import daskdl
from daskdl import Callback, Checkpoint, ReplicaError
from daskdl.util import versions
from tests.contract.test_report import page_of
from tests.support.problems import kept, rows, trainer

X, Y = rows()


class Fail(Callback):
    def on_step_end(self, step):
        if step.replica == 1 and step.number == 20:
            raise ValueError("no <more>")


@pytest.fixture
def fitted(tmp_path):
    fitted = trainer(
        False,
        master=kept(replicas_per_worker=2),
        callbacks=[Checkpoint((tmp_path / "checkpoints").as_uri())],
        seed=5,
    )
    fitted.fit(X, Y, epochs=3, batch_size=8, validation=(X, Y))
    return fitted.history_


def test_all_of_the_time_of_each_replica_is_in_its_timeline(fitted):
    timeline = fitted.timeline

    assert timeline.replicas == [0, 1]
    for replica in timeline.replicas:
        spans = [row for row in timeline if row["replica"] == replica]
        spent = sum(timeline.seconds(replica).values())
        assert spent == pytest.approx(spans[-1]["end"] - spans[0]["start"], rel=1e-3)
        assert 0 <= spans[0]["start"] < spans[-1]["end"] <= fitted.run.seconds
    expected = {"compute", "exchange", "data", "validation", "other"}
    expected |= {"checkpoint", "setup", "wait_join", "wait_gather", "wait_lease"}
    assert expected <= timeline.seconds().keys()


def test_waits_are_those_of_the_epochs(fitted):
    seconds = fitted.timeline.seconds()
    by_epoch = sum(row["waits"]["lease"] for row in fitted)

    assert seconds["wait_lease"] == pytest.approx(by_epoch, rel=1e-3)


def test_the_run_has_options_versions_and_replicas(fitted):
    run = fitted.run

    assert run.versions == versions()
    assert run.versions["daskdl"] == daskdl.__version__
    chosen = ("epochs", "batch_size", "seed", "loss", "callbacks", "scheduler")
    assert {name: run.options[name] for name in chosen} == {
        "epochs": "3",
        "batch_size": "8",
        "seed": "5",
        "loss": "CrossEntropyLoss",
        "callbacks": "Checkpoint",
        "scheduler": "None",
    }
    assert run.options["model"].endswith("804 trainable parameters")
    assert run.options["optimizer"].startswith("SGD, lr=0.05, momentum=0.9")
    assert "GradientSharing(" in run.options["master"]
    assert list(run.replicas) == [0, 1]
    assert {record["left"] for record in run.replicas.values()} == {None}
    assert run.error == ""


def test_credentials_are_not_in_the_report(tmp_path):
    secret = {"key": "hidden-key"}
    fitted = trainer(
        False, callbacks=[Checkpoint("memory://a", storage_options=secret)]
    )

    fitted.fit(X, Y, batch_size=64)
    fitted.history_.report(tmp_path / "run.html")

    assert "hidden-key" not in (tmp_path / "run.html").read_text()


def test_the_report_has_the_numbers_of_the_fit(fitted, tmp_path):
    page = page_of(fitted, tmp_path)

    summary = dict(page.tables["Summary"])
    assert summary["epochs"] == "3"
    assert summary["examples"] == f"{3 * len(X):,}"
    for name in ("loss", "val_loss", "val_accuracy"):
        assert float(summary[name]) == pytest.approx(fitted[-1][name], rel=1e-3)
    shares = {name: cells[0] for name, *cells in page.tables["Where the time went"]}
    shares.pop("activity")
    assert shares == {
        name.replace("wait_", "wait: "): f"{seconds:,.3f}"
        for name, seconds in fitted.timeline.seconds().items()
    }
    assert [timeline_row["replica"] for timeline_row in page.data["rows"]] == [0, 1]
    assert json.dumps(page.data).count("[") > len(fitted.timeline)


def test_a_failed_fit_has_a_report_with_its_error(tmp_path):
    interrupted = trainer(False, master=kept(replicas_per_worker=2), callbacks=[Fail()])

    with pytest.raises(ReplicaError):
        interrupted.fit(X, Y, epochs=2, batch_size=8)
    page = page_of(interrupted.history_, tmp_path)

    assert "ReplicaError: replica 1 on this machine" in page.text["Error"]
    assert "ValueError: no <more>" in page.text["Error"]
    assert "no <more>" in page.tables["Replicas"][2][4]
    assert interrupted.history_.timeline.seconds()["compute"] > 0
    assert interrupted.history_.run.seconds > 0


def test_the_timeline_has_the_checkpoints_that_are_taken_and_no_others(tmp_path):
    rule = Checkpoint(tmp_path, every=4)

    history = trainer(False, callbacks=[rule]).fit(X, Y, epochs=4)

    ends = [row["end"] for row in history.timeline if row["checkpoint"] > 0]
    assert ends
    assert min(ends) > sum(history.column("seconds")[:3])


class Begun(Callback):
    """On the client: keeps what it hears at the beginning."""

    def on_fit_begin(self, fit):
        self.fit = fit


def test_a_fit_has_the_name_that_its_user_gave_it_or_one_of_model_and_time(tmp_path):
    begun = Begun()
    fitted = trainer(False, callbacks=[begun])

    unnamed = fitted.fit(X, Y).run
    named = fitted.fit(X, Y, name="resnet <3>")

    year = time.strftime("%Y")
    assert re.fullmatch(rf"Sequential {year}-\d\d-\d\d \d\d:\d\d:\d\d", unnamed.name)
    assert named.run.name == begun.fit.name == "resnet <3>"
    assert named.run.id == begun.fit.run != unnamed.id
    assert re.fullmatch("[0-9a-f]{8}", unnamed.id)
    page = page_of(named, tmp_path)
    assert page.text[""].count("daskdl: resnet <3>") == 2  # title and heading
    assert dict(page.tables["Summary"])["run"] == named.run.id


class Writes(Callback):
    def __init__(self, path):
        self.path = path

    def on_fit_end(self, fit):
        fit.history.report(self.path)


def test_a_callback_can_write_the_report_when_a_fit_ends(tmp_path):
    path = tmp_path / "run.html"
    two = kept(replicas_per_worker=2)
    failing = trainer(False, callbacks=[Writes(path), Fail()], master=two)

    with pytest.raises(ReplicaError):
        failing.fit(X, Y, batch_size=8, epochs=2)

    assert "ValueError: no &lt;more&gt;" in path.read_text()
