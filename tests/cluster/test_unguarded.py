"""Scripts that start processes of their own, with and without a guard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daskdl.util import check_main_guard
from tests.support.processes import WITHIN_S

ROOT = Path(__file__).parents[2]
CHECK = "from daskdl.util import check_main_guard\n"
FIT = """
import numpy as np
from torch import nn
from daskdl import Trainer

X = np.zeros((8, 2), np.float32)
trainer = Trainer(
    nn.Linear(2, 2), loss=nn.CrossEntropyLoss(), optimizer="SGD", lr=0.1
)
"""
GUARD = 'if __name__ == "__main__":\n    '


def run(*arguments, folder, stdin=None):
    """The output of Python, and the last line of what it reports."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    return done.stdout, done.stderr


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


UNGUARDED = CHECK + 'check_main_guard("use x=1")\nprint("passed")\n'
TRUSTED = {
    "guarded": CHECK + GUARD + 'check_main_guard("")\n    print("passed")\n',
    "by function": CHECK
    + 'def main():\n    check_main_guard("")\n    print("passed")\n\n'
    + GUARD.replace('__name__ == "__main__"', '"__main__" == __name__')
    + "main()\n",
    "by variable": CHECK
    + 'here = __name__ == "__main__"\nif here:\n'
    + '    check_main_guard("")\n    print("passed")\n',
}


def test_a_fit_without_a_guard_says_so_once(tmp_path):
    text = FIT + "trainer.fit(X, X[:, 0].astype(int), epochs=1)\n"

    out, errors = run(script(tmp_path, text), folder=tmp_path)

    assert out == ""
    assert errors.count("Traceback") == 1
    last = errors.splitlines()[-1]
    assert 'outside of if __name__ == "__main__":' in last
    assert "client=False" in last


@pytest.mark.slow
def test_a_fit_below_a_guard_starts_a_cluster(tmp_path):
    body = "trainer.fit(X, X[:, 0].astype(int), epochs=1)\n    print('fitted')\n"

    out, errors = run(script(tmp_path, FIT + GUARD + body), folder=tmp_path)

    assert out == "fitted\n", errors


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"]])
def test_scripts_without_a_guard_are_refused(tmp_path, arguments):
    script(tmp_path, UNGUARDED)

    out, errors = run(*arguments, folder=tmp_path)

    assert out == ""
    assert (
        "line 2, starts worker processes, which import the script, outside of" in errors
    )
    assert "use x=1" in errors


@pytest.mark.slow
@pytest.mark.parametrize("text", TRUSTED.values(), ids=TRUSTED)
def test_scripts_with_a_guard_are_trusted(tmp_path, text):
    assert run(script(tmp_path, text), folder=tmp_path) == ("passed\n", "")


@pytest.mark.slow
def test_code_that_new_processes_do_not_import_needs_no_guard(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(UNGUARDED)

    typed = run("-c", UNGUARDED, folder=tmp_path)
    piped = run("-", folder=tmp_path, stdin=UNGUARDED)
    module = run("-m", "package", folder=tmp_path)

    assert typed == piped == module == ("passed\n", "")


def test_the_main_module_of_tests_is_trusted():
    check_main_guard("")


@pytest.mark.slow
def test_forked_processes_need_no_guard(tmp_path):
    setting = "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD"
    text = f"import os\nos.environ['{setting}'] = 'fork'\n{UNGUARDED}"

    assert run(script(tmp_path, text), folder=tmp_path) == ("passed\n", "")
