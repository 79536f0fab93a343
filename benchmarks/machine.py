"""What a measurement was made on, and with what: goes into every result."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "dask", "distributed", "numpy", "numba", "lz4")


def hardware() -> dict[str, object]:
    """The processor, its cores that may be used, and the memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def processor() -> str:
    """As the system calls it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def slug(found: dict[str, object]) -> str:
    """Hardware as a part of a file name.

    Example:
        >>> slug({"processor": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2})
        'xeon-2.50ghz-2cores'
    """
    words = re.sub(r"\(.*?\)", " ", str(found["processor"])).lower()
    words = re.sub(r"\b(intel|amd|cpu|processor)\b|@", " ", words)
    kept = re.findall(r"[a-z0-9.]+", words)
    return "-".join([*kept[:4], f"{found['cores']}cores"])


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in (*LIBRARIES, *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of this checkout, with a plus if files have changed; None outside of one."""
    try:
        number = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return number + "+" * bool(changed)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
