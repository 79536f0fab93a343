"""Keras is imported when it is needed, and with the backend that trains."""

import os
import subprocess
import sys

import pytest

IMPORTED = "import sys; import daskdl, daskdl.keras; print('keras' in sys.modules)"
LOADED = """
import os
from daskdl.keras.library import library
print(library().backend.backend(), 'KERAS_BACKEND' in os.environ)
"""
REFUSED = """
import daskdl
from daskdl.keras.library import library
try:
    library()
except daskdl.OptionError as error:
    print(error)
"""


def said(script, **environment):
    """What a new process says; `KERAS_BACKEND` is only as given."""
    inherited = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        env={**inherited, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_of_daskdl_does_not_import_keras():
    assert said(IMPORTED) == "False"


def test_the_backend_is_torch_where_nothing_is_said(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')

    assert said(LOADED, KERAS_HOME=str(tmp_path)) == "torch False"


def test_the_backend_may_be_said_to_be_torch():
    assert said(LOADED, KERAS_BACKEND="torch") == "torch True"


def test_another_backend_in_the_environment_is_refused():
    message = said(REFUSED, KERAS_BACKEND="jax")

    assert message == (
        "Keras models are trained on Keras' backend 'torch', and KERAS_BACKEND is "
        "'jax' in this process; set it to torch, or unset it, also on the workers"
    )


def imported(fake):
    """Where the library has been imported already, and is something else."""
    return f"import sys, types; sys.modules['keras'] = {fake}\n{REFUSED}"


def test_keras_that_was_imported_with_another_backend_is_refused():
    backend = "types.SimpleNamespace(backend=lambda: 'jax')"
    fake = f"types.SimpleNamespace(__version__='3.15.1', backend={backend})"

    message = said(imported(fake), KERAS_BACKEND="torch")

    assert message.startswith(
        "Keras models are trained on Keras' backend 'torch', and keras has been "
        "imported with 'jax' in this process; set KERAS_BACKEND=torch before"
    )


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ("None", "which cannot be imported here: import of keras halted"),
        ("types.SimpleNamespace(__version__='2.15.0')", "need Keras 3, got 2.15.0"),
    ],
    ids=["missing", "old"],
)
def test_keras_that_is_missing_or_old_is_refused(fake, message):
    answer = said(imported(fake))

    assert message in answer
    assert "pip install daskdl[keras]" in answer
