"""Fits whose workers are jobs of a batch system of this machine, with dask-jobqueue.

They need root, dask-jobqueue, and a system's packages of Debian, see `System`.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import daskdl
from daskdl.training.trainer_state import load_history
from tests.support.clusters import Script, TookPart, enough
from tests.support.problems import kept, normalised, rows, trainer
from tests.support.recording import Recorded, records

pytestmark = [pytest.mark.jobqueue, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
X, Y = rows(count=960)


@dataclass(frozen=True)
class System:
    """A batch system, and how its commands are called.

    Attributes:
        cluster: Class of dask-jobqueue.
        needs: Commands, in Debian's `packages`.
        cancels: Command that ends jobs.
        requeues: Command that ends a job and puts it into the queue again.
    """

    name: str
    cluster: str
    needs: tuple[str, ...]
    packages: str
    cancels: str
    requeues: str


SLURM = System(
    name="slurm",
    cluster="SLURMCluster",
    needs=("sbatch", "slurmctld", "slurmd", "munged"),
    packages="slurm-wlm and munge",
    cancels="scancel",
    requeues="scontrol requeue",
)
SGE = System(
    name="sge",
    cluster="SGECluster",
    needs=("qsub", "sge_qmaster", "sge_execd"),
    packages="gridengine-master, gridengine-exec and gridengine-client",
    cancels="qdel",
    requeues="qmod -rj",
)


@pytest.fixture(scope="module", autouse=True, params=[SLURM, SGE], ids=lambda s: s.name)
def system(request, tmp_path_factory):
    """A batch system of eight cores; jobs end and daemons stop with the module."""
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")
    batch_system = request.param
    for command in batch_system.needs:
        if shutil.which(command) is None:
            pytest.skip(f"no {command}: Debian has it in {batch_system.packages}")
    if os.geteuid() != 0:
        pytest.skip(f"starting {batch_system.name} needs root")
    folder = tmp_path_factory.mktemp(batch_system.name)
    script = HERE / f"one_machine_{batch_system.name}.sh"
    subprocess.run([script, "start", folder], check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("SGE_ROOT", "/var/lib/gridengine")
        yield batch_system
    subprocess.run([script, "stop", folder], check=True, timeout=60)


@pytest.fixture
def queue(tmp_path, system):
    """Starts clusters whose jobs are one worker of one thread each."""
    import dask_jobqueue

    with contextlib.ExitStack() as ends:

        def start(jobs, *extra):
            cluster = getattr(dask_jobqueue, system.cluster)(
                cores=1,
                memory="2GB",
                processes=1,
                walltime="00:05:00",
                python=sys.executable,
                local_directory=str(tmp_path),
                log_directory=str(tmp_path / "logs"),
                job_script_prologue=[f"export PYTHONPATH={ROOT}"],
                worker_extra_args=[*extra],
                scheduler_options={"host": "127.0.0.1", "dashboard_address": ":0"},
            )
            client = ends.enter_context(Client(ends.enter_context(cluster)))
            cluster.scale(jobs=jobs)
            client.wait_for_workers(jobs, timeout=60)
            return client

        yield start


def control(command, *jobs):
    subprocess.run([*command.split(), *jobs], check=True, timeout=30)


def shared_by_all(folder, epoch, replicas):
    """Check that these replicas, and no others, ended an epoch with the same model."""
    shared = {r: record["shared"] for r, record in records(folder, epoch).items()}
    assert sorted(shared) == replicas
    for replica in replicas[1:]:
        np.testing.assert_array_equal(shared[replicas[0]], shared[replica])


class Jobs:
    """A client whose fit is watched, and what is done to its jobs."""

    def __init__(self, client, folder):
        self.client, self.folder = client, folder
        self.places = TookPart(folder)

    def fit(self, *acts, **options):
        script = Script(*acts)
        master = Recorded(str(self.folder), kept())
        options = {"master": master, "model": normalised, **options}
        callbacks = [*options.pop("callbacks", []), self.places]
        fitted = trainer(self.client, callbacks=callbacks, **options)
        return script.run(fitted, X, Y), script.rows


def test_jobs_train(queue):
    fitted = trainer(queue(2))

    history = fitted.fit(X, Y, epochs=4, batch_size=16)

    assert history.column("replicas") == [2] * 4
    assert history.column("examples") == [960] * 4


def test_the_others_go_on_without_a_cancelled_job(system, queue, tmp_path):
    client = queue(2)
    jobs = Jobs(client, tmp_path)
    numbers = [job.job_id for job in client.cluster.workers.values()]

    fitted, rows = jobs.fit(
        (2, lambda: control(system.cancels, numbers[0])), (1, enough)
    )

    assert len(records(tmp_path, len(rows) - 1)) == 1
    assert sum(row["repeated_pieces"] for row in rows) <= 1
    gone = [
        record for record in fitted.history_.run.replicas.values() if record["left"]
    ]
    assert len(gone) == 1
    assert fitted.evaluate(X, Y)["accuracy"] > 0.5


def test_if_all_jobs_are_cancelled_the_error_says_what_to_set(system, queue, tmp_path):
    client = queue(2)
    numbers = [job.job_id for job in client.cluster.workers.values()]
    never = (lambda row: False, enough)
    script = Script((2, lambda: control(system.cancels, *numbers)), never)
    interrupted = trainer(client, master=kept(rejoin_timeout=3), callbacks=[script])

    ended = daskdl.RunError, daskdl.WaitTimeoutError  # they retire, or are killed
    with pytest.raises(ended, match="rejoin_timeout"):
        interrupted.fit(X, Y, epochs=10**6, batch_size=16)

    assert len(interrupted.history_) >= 1


def test_a_requeued_job_joins_again(system, queue, tmp_path):
    client = queue(3)
    jobs = Jobs(client, tmp_path)
    numbers = [job.job_id for job in client.cluster.workers.values()]

    fitted, rows = jobs.fit(
        (3, lambda: control(system.requeues, numbers[0])),
        (jobs.places.by(3), enough),
    )

    left = {r for r, record in fitted.history_.run.replicas.items() if record["left"]}
    assert len(left) == 1
    shared_by_all(tmp_path, len(rows) - 1, sorted({0, 1, 2, 3} - left))


def test_a_fit_follows_the_number_of_jobs(queue, tmp_path):
    client = queue(3)
    jobs = Jobs(client, tmp_path)
    cluster = client.cluster

    fitted, rows = jobs.fit(
        (3, lambda: cluster.scale(jobs=2)),
        (2, lambda: cluster.scale(jobs=3)),
        (3, enough),
    )

    left = {r for r, record in fitted.history_.run.replicas.items() if record["left"]}
    assert len(left) == 1
    shared_by_all(tmp_path, len(rows) - 1, sorted({0, 1, 2, 3} - left))
    assert sum(row["repeated_pieces"] for row in rows) <= 1


def test_a_fit_has_as_many_jobs_as_adapt_allows(queue, tmp_path):
    client = queue(1)
    jobs = Jobs(client, tmp_path)

    _, rows = jobs.fit(
        (1, lambda: client.cluster.adapt(minimum_jobs=1, maximum_jobs=2)), (2, enough)
    )

    shared_by_all(tmp_path, len(rows) - 1, [0, 1])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_fit_outlives_its_jobs(queue, tmp_path, checkpointed):
    client = queue(1, "--lifetime", "12s")
    places, rule = TookPart(tmp_path), daskdl.Checkpoint(str(tmp_path / "saved"))

    def fourth(row):
        notes = tmp_path.glob(f"took-part-*-{row['epoch']}")
        return max(int(note.name.split("-")[2]) for note in notes) >= 3

    script = Script((1, lambda: client.cluster.adapt(maximum_jobs=1)), (fourth, enough))
    fitted = trainer(client, callbacks=[places, *([rule] if checkpointed else [])])
    fitted = script.run(fitted, X, Y, validation=(X, Y))

    history = fitted.history_
    assert history.column("epoch") == list(range(len(history)))
    assert history.column("examples") == [len(X)] * len(history)
    assert [record["left"] is None for record in history.run.replicas.values()][:3] == (
        [False] * 3
    )
    fitted.client = False
    assert fitted.evaluate(X, Y)["accuracy"] > 0.5


def test_when_the_time_of_all_jobs_is_over_others_resume(queue, tmp_path):
    rule = daskdl.Checkpoint(str(tmp_path))
    client, master = queue(2, "--lifetime", "12s"), kept(rejoin_timeout=3)
    interrupted = trainer(client, master=master, callbacks=[rule])
    ended = daskdl.RunError, daskdl.WaitTimeoutError  # they retire, or are killed
    with pytest.raises(ended) as caught:
        interrupted.fit(X, Y, epochs=10**6, batch_size=16)
    assert "the last checkpoint" in "".join(caught.value.__notes__)
    epochs = len(interrupted.history_) + 5

    again = trainer(queue(2), callbacks=[rule])
    history = again.fit(X, Y, epochs=epochs, batch_size=16, resume=True)

    assert len(history) == epochs
    assert history.column("replicas")[-1] == 2


NETS = """
import daskdl, torch
from torch import nn

def small():
    return daskdl.Trainer(
        lambda: nn.Linear(20, 4), nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


def python(*arguments, **options):
    """Run Python in a process; return what it writes to its two streams."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("system", [SLURM], indirect=True, ids=["slurm"])
def test_the_command_line_trains_on_jobs(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    np.savez(tmp_path / "0.npz", x=X, y=Y)
    setting = "DASK_JOBQUEUE__SLURM__"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        f"{setting}CORES": "1",
        f"{setting}MEMORY": "2GB",
        f"{setting}WALLTIME": "00:05:00",
        f"{setting}LOG_DIRECTORY": str(tmp_path / "logs"),
    }
    command = "train nets:small --data 0.npz --epochs 300 --slurm 2 --save model"

    printed, log = python(
        "-m", "daskdl", *command.split(), cwd=tmp_path, env=environment
    )

    assert re.search(r"^saved in model$", printed, re.M)
    assert re.search(r"^dashboard: http://\S+/daskdl$", log, re.M)
    history = load_history(tmp_path / "model")
    assert history.column("replicas")[-1] == 2
    assert len(history) == 300


@pytest.mark.parametrize("system", [SLURM], indirect=True, ids=["slurm"])
def test_the_example_trains_on_jobs(tmp_path):
    printed, _ = python(ROOT / "examples" / "slurm.py", tmp_path, cwd=tmp_path)

    assert float(printed.split()[-1]) > 0.9
