"""Time and memory of a device, and how much is measured on it."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    scans: tuple[int, ...]  # parameters
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int  # sequences, of each replica
    steps: int  # of a plain loop between two fits
    copied: int  # bytes
    matrix: int  # rows
    rounds: int


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(
    work: Callable[[], Any], device: torch.device, loops: int = 1
) -> dict[str, float]:
    """Milliseconds of each of some calls, until the device is done."""
    wait_for(device)
    cpu_s, began = time.process_time(), time.perf_counter()
    for _ in range(loops):
        work()
    wait_for(device)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    return {"ms": 1e3 * seconds / loops, "cpu_ms": 1e3 * cpu_s / loops}


def device_ms(
    work: Callable[[], Any], device: torch.device, loops: int = 1
) -> dict[str, float]:
    """The same by events of the device, without the last call's return."""
    if device.type != "cuda":
        return {"ms": elapsed(work, device, loops)["ms"]}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait_for(device)
    begin.record()
    for _ in range(loops):
        work()
    end.record()
    end.synchronize()
    return {"ms": begin.elapsed_time(end) / loops}


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_now(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def peak_of(work: Callable[[], Any], device: torch.device) -> float:
    """Bytes that a call allocates at most beyond what there is; NaN on a CPU."""
    if device.type != "cuda":
        work()
        return math.nan
    wait_for(device)
    before = allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait_for(device)
    return torch.cuda.max_memory_allocated(device) - before


def clear_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        # After an illegal access, each call fails; the rows before it are kept.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 100 else f"{text[:97]}..."


def attempt(case: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The row of a case; an error, such as out of memory, becomes its note."""
    try:
        return {"case": case, **measure()}
    except Exception as error:
        note = reason(error)
    clear_memory()  # here, the error no longer keeps what its frames hold
    return {"case": case, "note": note}
