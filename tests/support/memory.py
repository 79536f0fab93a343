"""How much memory a process has had, as the system counts it."""

from pathlib import Path


def peak_bytes():
    """The most memory of this program, in bytes.

    Not `resource.getrusage`: what that tells starts at what the process had that this
    one was started from, which in a long test session is more than a worker needs.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmHWM")
