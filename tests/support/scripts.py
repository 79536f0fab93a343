"""Scripts that run in a process of their own, a fork that has imported daskdl."""

import os
import runpy
import sys
import tempfile
import warnings
from pathlib import Path

from distributed.utils import get_mp_context


def output_of(script: Path, ignored: list[str], within_s: float) -> str:
    """What a script prints, which has to end well.

    Args:
        script: Its path; it is run as the main program.
        ignored: Starts of the messages of warnings that are no errors.
        within_s: Seconds it may take.
    """
    with (
        tempfile.NamedTemporaryFile("r") as out,
        tempfile.NamedTemporaryFile("r") as err,
    ):
        arguments = (str(script), ignored, out.name, err.name)
        process = get_mp_context().Process(target=_run, args=arguments)
        process.start()
        process.join(within_s)
        if process.is_alive():
            process.kill()
            process.join()
        printed = out.read()
        assert process.exitcode == 0, printed + err.read()
    return printed


def _run(script: str, ignored: list[str], *outputs: str) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    # Also for the processes that it starts.
    sys.warnoptions[:] = ["error", *(f"ignore:{message}" for message in ignored)]
    warnings.simplefilter("error")
    for message in ignored:
        warnings.filterwarnings("ignore", message)
    runpy.run_path(script, run_name="__main__")
