"""What exchanges cost on a GPU: the scan, the copies, the steps, and memory.

Question: What does gradient sharing add to a step, to the memory of the device and to
          the work of the CPU, for models of 25 million to a billion parameters?
Counted:  ``copies``: the entries of an exchange, to the host and back. ``exchange``:
          its parts, each waited for, at the size of the transformer. ``scan``: `find`,
          `commit_` and `apply_` of the kernels, on normally distributed residuals of
          one of two replicas. ``steps``: a transformer like GPT-2 (124 million
          parameters, 16 sequences of 1,024 tokens, bfloat16 autocast, fused AdamW) in
          fits with ``client=False``. A fit of one replica makes no exchange; in the
          rows "every step" and "by default", each of its updates comes back to it as
          that of a second replica, which costs nothing else. Cases take turns; medians.
          *ratio* is to the baseline. *bytes/parameter* is the temporary memory of a
          scan, and the memory at the end of a step that a fit has beyond the plain
          loop. *cpu ms* counts all threads, also while they wait for the device.
Baseline: For a scan, ``r.add_(u)`` of as many float32. For a fit, a plain loop in this
          process, before it and after it; for two replicas on one device, two such
          loops in two threads.
Run:      python -m benchmarks cuda
          python -m benchmarks cuda --device cpu --small
"""

import argparse
import contextlib
import faulthandler
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import (
    Sizes,
    attempt,
    clear_memory,
    device_ms,
    elapsed,
    peak_of,
    reason,
    wait_for,
)
from benchmarks.results import Question, Row, in_turns, medians
from benchmarks.transformer import REPLICAS, parameters_of, steps
from daskdl import KeepResidual, SampledThreshold, codec
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters, empty
from daskdl.compression.kernels import VectorGroup
from daskdl.compression.replica_vector import kernels_for
from daskdl.process_settings import torch_threads

GRID = 2.0**-24
STAMP = codec.Stamp(run=1, origin=0, sequence=1, step=1)
SPREAD = 1e-2  # standard deviation of a residual
DENSITY = 0.05  # the default

FULL = Sizes(
    scans=(25_000_000, 250_000_000, 1_000_000_000),
    layers=12,
    width=768,
    heads=12,
    vocabulary=50257,
    sequence=1024,
    batch=16,
    steps=10,
    copied=2**30,
    matrix=8192,
    rounds=7,
)
SMALL = Sizes(
    scans=(20_000,),
    layers=1,
    width=16,
    heads=2,
    vocabulary=64,
    sequence=8,
    batch=2,
    steps=2,
    copied=2**16,
    matrix=64,
    rounds=2,
)


# ---- ceilings


def ceilings(sizes: Sizes, device: torch.device, until: float) -> Iterator[Row]:
    def copied() -> Row:
        source, target = (
            torch.empty(sizes.copied, dtype=torch.uint8, device=device) for _ in "ab"
        )
        rounds = [
            device_ms(lambda: target.copy_(source), device, loops=10)
            for _ in range(sizes.rounds)
        ]
        ms = medians(rounds[1:])["ms"]
        gb_per_s = 2 * sizes.copied / ms / 1e6
        return {"ms": ms, "rate": f"{gb_per_s:,.0f} GB/s", "gb_per_s": gb_per_s}

    def multiplied() -> Row:
        shape = sizes.matrix, sizes.matrix
        left, right = (
            torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "ab"
        )
        rounds = [
            device_ms(lambda: left @ right, device, loops=10)
            for _ in range(sizes.rounds)
        ]
        ms = medians(rounds[1:])["ms"]
        tflops = 2 * sizes.matrix**3 / ms / 1e9
        return {"ms": ms, "rate": f"{tflops:,.0f} TFLOP/s", "tflops": tflops}

    yield attempt(f"copy of {sizes.copied / 2**30:g} GiB, read and written", copied)
    yield attempt(f"bfloat16 matmul of {sizes.matrix:,} rows", multiplied)


# ---- copies between host and device


def copies(sizes: Sizes, device: torch.device, until: float) -> Iterator[Row]:
    """Entries and levels of an exchange: five bytes for each."""
    count = round(DENSITY * parameters_of(sizes))
    parts = [
        torch.arange(1, count + 1, dtype=torch.int32, device=device),
        torch.ones(count, dtype=torch.uint8, device=device),
    ]
    on_host = [part.to("cpu", copy=True) for part in parts]
    calls: dict[str, Callable[[], object]] = {
        "entries to the host, pageable": lambda: [
            p.to("cpu", copy=True) for p in parts
        ],
        "entries to the device, pageable": lambda: [
            p.to(device, copy=True) for p in on_host
        ],
    }
    if device.type == "cuda":
        calls |= PinnedCopies(parts, device).cases()
    cases = {c: functools.partial(elapsed, call, device) for c, call in calls.items()}
    rows = {case: attempt(case, measure) for case, measure in cases.items()}
    cases = {c: measure for c, measure in cases.items() if "note" not in rows[c]}
    for case, rounds in in_turns(cases, sizes.rounds, seconds=5).items():
        row = rows[case] = {"case": case, **medians(rounds)}
        if case.startswith("entries"):
            row["gb_per_s"] = 5 * count / row["ms"] / 1e6
            row["rate"] = f"{row['gb_per_s']:.1f} GB/s"
    yield from rows.values()


class PinnedCopies:
    """Copies through pinned memory on a stream of their own, alone and beside work."""

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._parts = parts  # on the device
        self._targets = [torch.empty_like(part) for part in parts]
        self._pinned = [part.cpu().pin_memory() for part in parts]
        self._stream = torch.cuda.Stream(device)
        self._matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def _copy(self, targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part, non_blocking=True)
        self._stream.synchronize()

    def to_host(self) -> None:
        self._copy(self._pinned, self._parts)

    def to_new_memory(self) -> None:
        new = [torch.empty_like(p, device="cpu", pin_memory=True) for p in self._parts]
        self._copy(new, self._parts)

    def to_device(self) -> None:
        self._copy(self._targets, self._pinned)

    def multiply(self) -> None:
        for _ in range(100):
            torch.matmul(self._matrix, self._matrix)

    def pageable_beside(self) -> None:
        self.multiply()
        for part in self._parts:
            part.cpu().to(self._device)

    def pinned_beside(self) -> None:
        self.multiply()
        self.to_host()
        self.to_device()

    def cases(self) -> dict[str, Callable[[], None]]:
        return {
            "entries to the host, pinned": self.to_host,
            "entries to the host, pinned anew": self.to_new_memory,
            "entries to the device, pinned": self.to_device,
            "matmuls": self.multiply,
            "matmuls, both copies pageable": self.pageable_beside,
            "matmuls, both copies pinned": self.pinned_beside,
        }


# ---- the parts of an exchange


class Laps:
    """Wall time and CPU time of successive parts, each until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ms: dict[str, float] = {}
        self.cpu_ms: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        wait_for(self._device)
        self._cpu_s, self._began = time.process_time(), time.perf_counter()

    def end(self, part: str) -> None:
        wait_for(self._device)
        self.ms[part] = 1e3 * (time.perf_counter() - self._began)
        self.cpu_ms[part] = 1e3 * (time.process_time() - self._cpu_s)
        self.begin()


class Exchanger:
    """A replica of two, whose updates come back as those of the second one."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._module = nn.Linear(1, size, bias=False, device=device)
        self._parameters = FlatParameters(self._module)
        rule = SampledThreshold(DENSITY)
        self._compressor = Compressor(self._parameters, rule, KeepResidual())
        self._compressor.vector.set_scale_(1 / REPLICAS)
        self.frame_bytes = self.entries = 0

    def _step(self) -> None:
        with torch.no_grad():
            self._module.weight += SPREAD * torch.randn_like(self._module.weight)
        self._compressor.vector.sync_from_parameters_()

    def all_parts(self) -> Laps:
        self._step()
        laps = Laps(self._device)
        [update] = self._compressor.propose()
        frame = update.encode(STAMP)
        self._compressor.commit_(update)
        self._compressor.vector.apply_(codec.decode(frame.data))
        laps.end("all parts, as in a fit")
        self.frame_bytes, self.entries = frame.nbytes, update.entries
        return laps

    def single_parts(self) -> Laps:
        self._step()
        compressor, vector = self._compressor, self._compressor.vector
        [group] = compressor.groups.values()
        [vectors] = vector.groups
        laps = Laps(self._device)
        threshold = group.next_threshold(group.sent, vector.grid)
        count = round(threshold / vector.grid)
        laps.end("threshold from a sample")
        entries_K, levels_K = vectors.find(count, vector.grid, vector.local_factor)
        laps.end("find")
        host_entries_K, host_levels_K = entries_K.cpu().numpy(), levels_K.cpu().numpy()
        laps.end("to the host")
        body = codec.pack(vector.size, host_entries_K, host_levels_K)
        laps.end("pack")
        frame = codec.framed(STAMP, count * vector.grid, body)
        laps.end("frame")
        update = codec.decode(frame.data)
        laps.end("decode")
        assert isinstance(update, codec.SparseUpdate)
        entries_K = torch.from_numpy(update.entries_K).to(self._device)
        levels = update.levels_K
        levels_K = None if levels is None else torch.from_numpy(levels).to(self._device)
        laps.end("to the device")
        vectors.commit_(
            entries_K, count, vector.grid, math.inf, vector.local_factor, levels_K
        )
        laps.end("commit_")
        vectors.apply_(entries_K, count, vector.grid, levels_K)
        laps.end("apply_")
        return laps


def exchange(sizes: Sizes, device: torch.device, until: float) -> Iterator[Row]:
    size = parameters_of(sizes)
    exchanger = Exchanger(size, device)
    cases = {"all": exchanger.all_parts, "single": exchanger.single_parts}
    in_turns(cases, 1)  # compiles, and fills caches
    taken = in_turns(cases, sizes.rounds, seconds=8)
    shape = f"{exchanger.entries:,} entries, {exchanger.frame_bytes / 1e6:.1f} MB"
    for laps in taken.values():
        ms = medians([lap.ms for lap in laps])
        cpu_ms = medians([lap.cpu_ms for lap in laps])
        for part in ms:
            note = shape if part.startswith("all") else None
            row = {"case": f"exchange: {part}", "ms": ms[part], "cpu_ms": cpu_ms[part]}
            yield {**row, "note": note, "parameters": size}
    on_cpu = ("pack", "frame", "decode")
    yield {
        "case": f"exchange: {', '.join(on_cpu)}",
        "ms": sum(ms[part] for part in on_cpu),
        "cpu_ms": sum(cpu_ms[part] for part in on_cpu),
        "parameters": size,
    }


# ---- the scan


def kernels_to_compare(device: torch.device) -> dict[str, type[VectorGroup]]:
    """By name; Triton's only where it is installed."""
    kinds = {"torch": VectorGroup}
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module("daskdl.compression.kernels_triton")
            kinds["Triton"] = module.TritonGroup
    if kernels_for(device) not in kinds.values():
        kinds["compiled"] = kernels_for(device)
    return kinds


class Scanned:
    """Vectors of a replica of two, and entries of each density for them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.local_N, self.update_N = (
            empty(size, torch.float32, device) for _ in range(2)
        )
        self.shared_N = empty(size, torch.int32, device)
        self.update_N.normal_(0, SPREAD)
        self.reset_()

    def reset_(self, seed: int = 0) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        self.local_N.normal_(0, SPREAD, generator=generator)
        self.shared_N.fill_(1)

    def group(self, kind: type[VectorGroup]) -> VectorGroup:
        return kind(self.local_N, self.local_N, self.shared_N, 0)

    def count_for(self, density: float) -> int:
        """The quantum, in steps of the grid, that so many residuals reach."""
        self.reset_()
        sample = self.local_N[:1_000_000].abs() / REPLICAS
        largest = sample.kthvalue(int(sample.numel() * (1 - density))).values
        return round(largest.item() / GRID)

    def measure(self, work: Callable[[], Any], loops: int = 1) -> dict[str, float]:
        self.reset_()
        return device_ms(work, self.device, loops)


def scans_of(
    scanned: Scanned, kind: type[VectorGroup], density: float
) -> tuple[dict[str, Callable[[], Any]], bool]:
    """What is timed, by name, and whether the entries are those of `VectorGroup`."""
    count, group = scanned.count_for(density), scanned.group(kind)
    reference = scanned.group(VectorGroup)
    scanned.reset_(seed=1)
    peer_entries_K, peer_levels_K = reference.find(count, GRID, REPLICAS)
    scanned.reset_()
    entries_K, levels_K = reference.find(count, GRID, REPLICAS)

    def find() -> tuple[Tensor, Tensor]:
        return group.find(count, GRID, REPLICAS)

    def commit(entries_K: Tensor, levels_K: Tensor) -> None:
        group.commit_(entries_K, count, GRID, math.inf, REPLICAS, levels_K)

    def apply() -> None:
        group.apply_(peer_entries_K, count, GRID, peer_levels_K)

    def together() -> None:
        commit(*find())
        apply()

    pairs = zip(find(), (entries_K, levels_K), strict=True)
    alike = all(torch.equal(listed, expected) for listed, expected in pairs)
    if density != DENSITY:
        return {"all three": together}, alike
    calls = {"find": find, "commit_": lambda: commit(entries_K, levels_K)}
    return {**calls, "apply_": apply, "all three": together}, alike


def scans_at(size: int, sizes: Sizes, device: torch.device) -> Iterator[Row]:
    scanned = Scanned(size, device)
    millions = f"{size / 1e6:,g} M"
    rows: dict[str, dict[str, Any]] = {}
    cases: dict[str, Callable[[], dict[str, float]]] = {}

    def add(case: str, work: Callable[[], Any], loops: int = 1) -> None:
        def measured() -> Row:
            scanned.reset_()
            return {"bytes_per_parameter": peak_of(work, device) / size}

        rows[case] = attempt(case, measured)
        if "bytes_per_parameter" in rows[case]:
            cases[case] = functools.partial(scanned.measure, work, loops)

    baseline = f"{millions}: r.add_(u)"
    add(baseline, lambda: scanned.local_N.add_(scanned.update_N), loops=10)
    for density in (DENSITY, 0.01):
        for name, kind in kernels_to_compare(device).items():
            case = f"{millions} at {density:g}, {name}"
            try:
                works, alike = scans_of(scanned, kind, density)
            except Exception as error:
                rows[case] = {"case": case, "note": reason(error)}
                continue
            for part, work in works.items():
                add(f"{case}: {part}", work)
                if not alike:
                    rows[f"{case}: {part}"]["note"] = "other entries than torch's"
    taken = in_turns(cases, sizes.rounds, seconds=8)
    for case, row in rows.items():
        if case in taken:
            row |= medians(taken[case])
            row["ratio"] = row["ms"] / medians(taken[baseline])["ms"]
            row["parameters"] = size
        yield row


def scan(sizes: Sizes, device: torch.device, until: float) -> Iterator[Row]:
    if device.type == "cuda" and "Triton" not in kernels_to_compare(device):
        yield {"case": "Triton", "note": "daskdl has no kernels, or there is no triton"}
    for size in sizes.scans:
        note = None
        try:
            yield from scans_at(size, sizes, device)
        except Exception as error:
            note = reason(error)
        clear_memory()
        if note is not None:
            yield {"case": f"{size / 1e6:,g} M", "note": note}


# ---- the question


PARTS: dict[str, Callable[[Sizes, torch.device, float], Iterator[Row]]] = {
    "ceilings": ceilings,
    "copies": copies,
    "exchange": exchange,
    "scan": scan,
    "steps": steps,
}
GRACE_S = 60  # beyond the time, until a hanging measurement is ended


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "cuda measures a CUDA device, and torch finds none; on a CPU, use "
            "--device cpu --small"
        )
    if device.index is not None:
        torch.cuda.set_device(device)
    sizes = SMALL if asked.small else FULL
    if asked.batch is not None:
        sizes = replace(sizes, batch=asked.batch)
    until = time.monotonic() + asked.seconds
    with contextlib.ExitStack() as ends:
        if device.type == "cpu":
            ends.enter_context(torch_threads(1))
        # A measurement that hangs shows where; a file has the rows before it.
        ends.callback(faulthandler.cancel_dump_traceback_later)
        faulthandler.dump_traceback_later(
            asked.seconds + GRACE_S, exit=True, file=sys.__stderr__
        )
        for name in asked.parts:
            began, note = time.monotonic(), None
            try:
                for row in PARTS[name](sizes, device, until):
                    yield {"part": name, **row}
            except Exception as error:
                note = reason(error)
            if note is not None:
                yield {"part": name, "case": name, "note": note}
            clear_memory()
            asked.notes.append(f"{name} took {time.monotonic() - began:.0f} s")
            print(f"# {asked.notes[-1]}", flush=True)


QUESTION = Question(
    "cuda",
    __doc__,
    rows,
    "case ms:.3f ratio:.3f cpu_ms:.1f bytes_per_parameter:.1f rate note",
    {
        "--device": {"default": "cuda", "help": "to measure on (%(default)s)"},
        "--parts": {
            "nargs": "+",
            "choices": PARTS,
            "default": list(PARTS),
            "metavar": "PART",
            "help": f"some of {', '.join(PARTS)} (all)",
        },
        "--batch": {"type": int, "help": f"sequences of each replica ({FULL.batch})"},
        "--seconds": {
            "type": int,
            "default": 135,
            "help": "after these, fits are left out (%(default)s)",
        },
        "--small": {"action": "store_true", "help": "sizes for a test, on any device"},
    },
)
