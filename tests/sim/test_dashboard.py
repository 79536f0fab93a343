"""The numbers of a fit reach the scheduler, whatever happens to its replicas."""

import pytest

from tests.sim.fit import Cluster, Setup

LIMIT_S = 600.0


def fit(setup, act=lambda cluster: None):
    """Run a fit; return the record of the run."""
    cluster = Cluster(3, setup)
    try:
        act(cluster)
        cluster.fit(LIMIT_S)
        assert cluster.client.error is None
        board = cluster.scheduler.plugin.dashboard
        return board.runs[cluster.client.spec.run]
    finally:
        cluster.close()


@pytest.mark.parametrize("routing", ["plain", "mesh"])
def test_all_examples_of_all_replicas_are_counted(routing):
    setup = Setup(epochs=3, routing=routing)

    record = fit(setup)

    last = [record.last(replica) for replica in record.listed]
    assert sum(row["examples"] for row in last) == setup.epochs * sum(setup.lengths)
    assert all(row["sent_bytes"] and row["received_bytes"] for row in last)
    assert {row["epoch"] for row in last} == {2}
    assert (record.phase, record.why) == ("finished", "")
    assert {listed.why for listed in record.listed.values()} == {
        "left: its task has ended"
    }


def test_bytes_and_waits_are_those_of_the_reports_of_all_epochs():
    setup = Setup(epochs=3)
    cluster = Cluster(3, setup)
    try:
        cluster.fit(LIMIT_S)
        record = cluster.scheduler.plugin.dashboard.runs[cluster.client.spec.run]
        reports = [
            report for event in cluster.client.reports for report in event["payloads"]
        ]
    finally:
        cluster.close()

    for replica in record.listed:
        traffic = [report["traffic"] for r, report in reports if r == replica]
        for name in ("sent_bytes", "received_bytes"):
            assert record.last(replica)[name] == sum(counts[name] for counts in traffic)
        for cause, waited_s in record.waits_s(replica).items():
            of_cause = sum(counts["waits_s"].get(cause, 0.0) for counts in traffic)
            assert waited_s == pytest.approx(of_cause), cause


def test_reports_come_at_most_once_a_second_and_at_the_end_of_epochs():
    setup = Setup(epochs=2, mean_step_s=0.2, lengths=(160, 160, 160))

    record = fit(setup)

    lasted_s = record.second(record.over[0])
    for replica, columns in record.series().items():
        assert len(columns["second"]) <= lasted_s + setup.epochs + 1, replica
        assert len(columns["second"]) >= lasted_s / 2, replica


def test_a_replica_that_is_killed_is_listed_with_the_reason():
    def kill(cluster):
        worker = cluster.workers["worker-1"]
        cluster.world.after(1.5, worker.process, lambda: worker.kill(notice_s=0.1))

    record = fit(Setup(epochs=4, mean_step_s=0.2), kill)

    failed = {r: listed.why for r, listed in record.listed.items() if listed.failed}
    assert list(failed) == [1]
    assert failed[1].startswith("lost: ")
    assert "its worker is gone" in failed[1] or "cannot be reached" in failed[1]


def test_a_worker_that_closes_retires_its_replica():
    def close(cluster):
        worker = cluster.workers["worker-1"]
        begin = lambda: worker.start(worker.close())  # noqa: E731
        cluster.world.after(1.5, worker.process, begin)

    record = fit(Setup(epochs=4, mean_step_s=0.2), close)

    assert record.listed[1].why == "retired with its worker"
    assert not record.listed[1].failed
