"""A fit on hosts over SSH, with an SSH server of the test on this machine.

It needs root, Debian's openssh-server, and asyncssh.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, SSHCluster
from distributed.utils_test import poll_for

from daskdl import Checkpoint
from tests.support.clusters import Script, TookPart, enough
from tests.support.problems import kept, normalised, rows, trainer

pytestmark = [pytest.mark.jobqueue, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
PRIVILEGE_SEPARATION = Path("/run/sshd")  # sshd does not start without this folder
WITHIN_S = 30
X, Y = rows(count=960)


@pytest.fixture
def login(tmp_path):
    """How asyncssh logs in to an SSH server of this machine, which runs meanwhile."""
    pytest.importorskip("asyncssh", reason="asyncssh is not installed")
    server = shutil.which("sshd", path=f"/usr/sbin:{os.environ['PATH']}")
    if server is None:
        pytest.skip("no sshd: Debian has it in openssh-server")
    if os.geteuid() != 0:
        pytest.skip("starting sshd needs root")
    PRIVILEGE_SEPARATION.mkdir(exist_ok=True)
    host_key, user_key = tmp_path / "host", tmp_path / "user"
    for key in (host_key, user_key):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key]
        subprocess.run(command, check=True, timeout=WITHIN_S)
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    options = {
        "ListenAddress": HOST,
        "Port": port,
        "HostKey": host_key,
        "AuthorizedKeysFile": f"{user_key}.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
    }
    settings = [f"-o{name}={value}" for name, value in options.items()]
    command = [server, "-D", "-e", "-f", "/dev/null", *settings]
    with subprocess.Popen(command) as process:
        try:
            poll_for(lambda: listens(port), WITHIN_S)
            yield {
                "port": port,
                "username": "root",
                "client_keys": [str(user_key)],
                "known_hosts": None,
            }
        finally:
            process.kill()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def test_a_fit_over_ssh_goes_on_without_a_killed_worker_and_from_a_checkpoint(
    login, tmp_path
):
    cluster = SSHCluster(
        [HOST] * 3,
        connect_options=login,
        worker_options={"nthreads": 1, "local_directory": str(tmp_path)},
        scheduler_options={"port": 0, "dashboard_address": ":0"},
        remote_python=f"env PYTHONPATH={ROOT} {sys.executable}",
    )
    with cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=WITHIN_S)
        places = TookPart(tmp_path)
        saved = Checkpoint(tmp_path / "checkpoints")

        def kill():
            process_id = client.run(os.getpid)[min(client.nthreads())]
            os.kill(process_id, signal.SIGKILL)

        script = Script((2, kill), (places.by(2), enough))
        options = {"master": kept(), "model": normalised}
        stopped = trainer(client, callbacks=[saved, places], **options)
        script.run(stopped, X, Y)
        epochs = len(stopped.history_) + 1
        resumed = trainer(client, callbacks=[saved], **options)
        resumed.fit(X, Y, epochs=epochs, batch_size=16, resume=True)

        losses = [r for r in stopped.history_.run.replicas.values() if r["left"]]
        assert len(losses) == 1
        agreed = epochs - 2  # the last epoch may have no checkpoint
        before, after = (f.history_.column("loss") for f in (stopped, resumed))
        assert after[:agreed] == before[:agreed]
        assert resumed.history_.column("examples") == [960] * epochs
        assert resumed.evaluate(X, Y)["accuracy"] > 0.5
