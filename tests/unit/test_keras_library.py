"""Keras is imported when it is needed, and with the backend that trains."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from daskdl.errors import OptionError
from daskdl.keras.module import library

LOADED = """
import os, sys
import daskdl, daskdl.keras
from daskdl.keras.module import library
print('keras' in sys.modules)
print(library().backend.backend(), 'KERAS_BACKEND' in os.environ)
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
    return done.stdout.split()


@pytest.mark.parametrize(
    "chosen",
    [{}, pytest.param({"KERAS_BACKEND": "torch"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_backend_is_torch_from_the_first_use_on(tmp_path, chosen):
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')

    imported, backend, is_set = said(LOADED, KERAS_HOME=str(tmp_path), **chosen)

    assert (imported, backend) == ("False", "torch")
    assert is_set == str(bool(chosen))


def refused(message):
    """What is expected of a first use; the one of this process is remembered."""
    return pytest.raises(OptionError, match=re.escape(message))


def test_another_backend_in_the_environment_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "jax")

    with refused(
        "Keras models are trained on Keras' backend 'torch', and KERAS_BACKEND is "
        "'jax' in this process; set it to torch, or unset it, also on the workers"
    ):
        library.__wrapped__()


def test_keras_that_was_imported_with_another_backend_is_refused(monkeypatch):
    backend = SimpleNamespace(backend=lambda: "jax")
    fake = SimpleNamespace(__version__="3.15.1", backend=backend)
    monkeypatch.setitem(sys.modules, "keras", fake)
    monkeypatch.setenv("KERAS_BACKEND", "torch")

    with refused(
        "Keras models are trained on Keras' backend 'torch', and keras has been "
        "imported with 'jax' in this process; set KERAS_BACKEND=torch before"
    ):
        library.__wrapped__()


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (None, "which cannot be imported here: import of keras halted"),
        (SimpleNamespace(__version__="2.15.0"), "need Keras 3, got 2.15.0"),
    ],
    ids=["missing", "old"],
)
def test_keras_that_is_missing_or_old_is_refused(fake, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", fake)

    with refused(message) as caught:
        library.__wrapped__()

    assert "pip install daskdl[keras]" in str(caught.value)
