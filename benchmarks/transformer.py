"""A transformer like GPT-2 in plain loops and in fits, as a part of `cuda`.

The one replica of a fit exchanges with itself: its channel sends back each update as
that of a second replica, which costs nothing else.
"""

import concurrent.futures
import contextlib
import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import daskdl
from benchmarks.device import (
    Sizes,
    allocated,
    attempt,
    clear_memory,
    elapsed,
    peak_now,
    reason,
    wait_for,
)
from benchmarks.results import Row, in_turns
from benchmarks.work import batches
from daskdl import GradientSharing, codec
from daskdl.channel.inbox import DrainResult
from daskdl.training.base import Exchange, ReplicaContext

REPLICAS = 2


class Block(nn.Module):
    """A layer of a transformer, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        parts = self.attention(self.norm_1(x)).split(width, dim=2)
        q, k, v = (
            p.view(batch, sequence, self.heads, -1).transpose(1, 2) for p in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.outer(F.gelu(self.inner(self.norm_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Predicts each next token; the last layer is tied to the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.sequence, sizes.width)
        layers = [Block(sizes.width, sizes.heads) for _ in range(sizes.layers)]
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(sizes.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(x), self.tokens.weight)


@functools.cache
def transformer(sizes: Sizes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(sizes)


def parameters_of(sizes: Sizes) -> int:
    return sum(parameter.numel() for parameter in transformer(sizes).parameters())


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


class Loop:
    """Plain PyTorch, as its documentation has it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        data: tuple[Tensor, Tensor],
        sizes: Sizes,
        device: torch.device,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        self._device = device
        before = allocated(device)
        self._module = wrap(copy.deepcopy(model).to(device))
        self._optimizer = optimizer(self._module.parameters())
        self._batches = batches(*data, sizes.batch, np.random.default_rng(0))
        self.steps(2)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.steps(1)
        self.at_rest = allocated(device) - before
        self.peak = peak_now(device) - before

    def steps(self, count: int, *, reads_loss: bool = False) -> None:
        for _ in range(count):
            x, y = (part.to(self._device) for part in next(self._batches))
            self._optimizer.zero_grad()
            with torch.autocast(self._device.type, torch.bfloat16):
                loss = token_loss(self._module(x), y)
            loss.backward()
            if reads_loss:
                loss.item()
            self._optimizer.step()
        wait_for(self._device)

    def step_ms(self, count: int, *, reads_loss: bool = False) -> float:
        self.steps(1)  # allocates again what `clear_memory` has freed
        work = functools.partial(self.steps, count, reads_loss=reads_loss)
        return elapsed(work, self._device)["ms"] / count


# Of the replicas of the present fit, which are threads of this process: seconds at the
# end of each step, and memory of the device at the end of the last one.
MARKS: dict[int, list[float]] = {}
MEMORY: dict[str, int] = {}


class Marks(daskdl.Callback):
    """Notes when a replica has made a step, before its exchange."""

    def __init__(self, skipped: int, last: int, device: str, until: float) -> None:
        self._skipped = skipped
        self._last = last
        self._device = torch.device(device)
        self._until = until

    def on_step_end(self, step: daskdl.Step) -> None:
        MARKS.setdefault(step.replica, []).append(time.perf_counter())
        if step.number == self._skipped and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if step.number == self._last:
            MEMORY["at rest"] = allocated(self._device)
            MEMORY["peak"] = peak_now(self._device)
        if time.monotonic() > self._until:
            step.stop("the time is up")


class Echo:
    """The channel of a fit's only replica, with a peer that sends back each update."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._sequence = 0
        self._updates: list[codec.Update] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def peers(self) -> Sequence[int]:
        return [1]

    def publish(
        self, encode: Callable[[codec.Stamp], Any], step: int, **options: Any
    ) -> Any:
        self._sequence += 1
        stamp = codec.Stamp(self._channel.run, 1, self._sequence, step)
        frame = encode(stamp)
        self._updates.append(codec.decode(frame.data))
        return frame

    def drain(self, up_to_step: int | None = None) -> DrainResult:
        updates, self._updates = self._updates, []
        return DrainResult(updates, None)


@dataclass(frozen=True)
class WithEcho(GradientSharing):
    """Gradient sharing of one replica with itself: all the work of two, once."""

    @property
    def solo_scale(self) -> float | None:
        return None  # exchanges from the start

    def attach(self, context: ReplicaContext) -> Exchange:
        channel: Any = Echo(context.channel)
        return super().attach(replace(context, channel=channel))


class Fits:
    """Fits of the transformer, and plain loops in the same process."""

    def __init__(self, sizes: Sizes, device: torch.device, until: float) -> None:
        self._sizes, self._device, self._until = sizes, device, until
        self._model = transformer(sizes)
        self._optimizer = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
        self.parameters = parameters_of(sizes)
        self._longest_s = 0.0  # duration of a fit
        self.plain = self._loop()

    def _data(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = rows, self._sizes.sequence + 1
        tokens = torch.randint(self._sizes.vocabulary, shape)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _loop(self, **options: Any) -> Loop:
        data = self._data(8 * self._sizes.batch)
        return Loop(
            self._model, self._optimizer, data, self._sizes, self._device, **options
        )

    def _row(self, step_ms: float, plain_ms: float, **columns: Any) -> dict[str, Any]:
        tokens_per_s = 1e3 * self._sizes.batch * self._sizes.sequence / step_ms
        rate = f"{tokens_per_s:,.0f} tokens/s"
        row = {"ms": step_ms, "ratio": step_ms / plain_ms, "rate": rate}
        return {**row, "parameters": self.parameters, **columns}

    def plain_loops(self) -> Iterator[Row]:
        """The plain loop, the same when it reads each loss, and the same under DDP."""
        sizes, device = self._sizes, self._device
        rows = [{"case": "the same, DDP of one process"}]
        cases = {
            "plain loop": lambda: self.plain.step_ms(sizes.steps),
            "the same, reads each loss": lambda: self.plain.step_ms(
                sizes.steps, reads_loss=True
            ),
        }
        with contextlib.ExitStack() as ends:
            try:
                ends.enter_context(process_group(device))
                ids = [torch.cuda.current_device()] if device.type == "cuda" else None
                wrap = functools.partial(DistributedDataParallel, device_ids=ids)
                ddp = self._loop(wrap=wrap)
            except Exception as error:
                rows[0]["note"] = reason(error)
            else:
                cases[rows.pop()["case"]] = lambda: ddp.step_ms(sizes.steps)
            taken = in_turns(cases, 3, seconds=10)
            plain_ms = statistics.median(taken["plain loop"])
            for case, rounds in taken.items():
                row = self._row(statistics.median(rounds), plain_ms)
                if case.endswith("DDP of one process") and device.type == "cuda":
                    beyond = ddp.at_rest - self.plain.at_rest
                    row["bytes_per_parameter"] = beyond / self.parameters
                rows.append({"case": case, **row})
            ddp = None
        clear_memory()
        yield from rows

    def two_loops(self) -> dict[str, Any]:
        """A step of each of two loops in two threads."""
        with concurrent.futures.ThreadPoolExecutor(REPLICAS) as pool:
            loops = [self._loop() for _ in range(REPLICAS)]
            count = self._sizes.steps
            list(pool.map(lambda loop: loop.steps(2), loops))

            def work() -> None:
                list(pool.map(lambda loop: loop.steps(count), loops))

            step_ms = elapsed(work, self._device)["ms"] / count
        return self._row(step_ms, step_ms)

    def row(
        self,
        master: daskdl.TrainingMaster,
        skipped: int,
        counted: int,
        baseline_ms: float | None = None,
    ) -> dict[str, Any]:
        """Measure a fit; without a baseline, a plain loop before and after it."""
        if time.monotonic() + self._longest_s > self._until:
            return {"note": "left out: the time is up"}
        started = time.monotonic()
        before_ms = baseline_ms or self.plain.step_ms(self._sizes.steps)
        clear_memory()
        measured = self._fit(master, skipped, counted)
        clear_memory()
        after_ms = baseline_ms or self.plain.step_ms(self._sizes.steps)
        self._longest_s = max(self._longest_s, time.monotonic() - started)
        step_ms = measured.pop("ms")
        return self._row(step_ms, (before_ms + after_ms) / 2, **measured)

    def _fit(
        self, master: daskdl.TrainingMaster, skipped: int, counted: int
    ) -> dict[str, Any]:
        device, replicas = self._device, int(master.replicas_per_worker)
        MARKS.clear()
        MEMORY.clear()
        before, last = allocated(device), skipped + counted
        marks = Marks(skipped, last, str(device), self._until)
        trainer = daskdl.Trainer(
            self._model,
            token_loss,
            self._optimizer,
            master=master,
            client=False,
            device="auto" if str(device) == "cuda" else device,
            autocast=torch.bfloat16,
            callbacks=[marks],
            progress=False,
        )
        began = time.monotonic()
        data = self._data((last + 2) * replicas * self._sizes.batch)
        history = trainer.fit(*data, batch_size=self._sizes.batch)
        seconds = time.monotonic() - began
        steps_ms = []
        for times in MARKS.values():
            spanned = times[skipped - 1 : last]
            if len(spanned) < 2:
                raise RuntimeError(f"only {len(times)} steps in {seconds:.0f} s")
            duration_s = spanned[-1] - spanned[0]
            steps_ms.append(1e3 * duration_s / (len(spanned) - 1))
        exchanges = [
            step
            for step in history.steps
            if step["step"] > skipped and not math.isnan(step["density"])
        ]
        row: dict[str, Any] = {
            "ms": statistics.fmean(steps_ms),
            "fit_s": seconds,
            "density": history[-1]["density"],
        }
        note = f"fit {seconds:.0f} s"
        if exchanges:
            row["sent_bytes"] = statistics.median(s["sent_bytes"] for s in exchanges)
            row["encode_ms"] = 1e3 * statistics.median(s["encode_s"] for s in exchanges)
            note += f", encode {row['encode_ms']:.0f} ms"
        if device.type == "cuda" and replicas == 1 and MEMORY:
            beyond = {
                "at_rest": MEMORY["at rest"] - before - self.plain.at_rest,
                "peak": MEMORY["peak"] - before - self.plain.peak,
            }
            row |= {name: extra / self.parameters for name, extra in beyond.items()}
            row["bytes_per_parameter"] = row["at_rest"]
            note += f", peak {row['peak']:+.1f}"
        return {**row, "note": note}


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """A group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = distributed.HashStore()
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def steps(sizes: Sizes, device: torch.device, until: float) -> Iterator[Row]:
    fits = Fits(sizes, device, until)
    yield from fits.plain_loops()
    few, many = 2 * sizes.steps, 5 * sizes.steps - sizes.steps // 5
    alone = attempt(
        "fit, 1 replica: no exchange", lambda: fits.row(GradientSharing(), 4, few)
    )
    yield alone
    each_step = attempt(
        "fit, 1 replica: every step",
        lambda: fits.row(WithEcho(exchange_every=1), 4, few),
    )
    yield each_step
    yield attempt("fit, 1 replica: by default", lambda: fits.row(WithEcho(), 16, many))
    if "ms" in alone and "ms" in each_step:
        yield later(alone, each_step)
    two = attempt("2 plain loops, each", fits.two_loops)
    yield two
    clear_memory()
    if "ms" in two:
        for case, options in (
            ("every step", {"exchange_every": 1}),
            ("by default", {}),
        ):
            master = GradientSharing(replicas_per_worker=REPLICAS, **options)
            skipped, counted = (4, few) if options else (16, many)
            yield attempt(
                f"fit, 2 replicas: {case}",
                functools.partial(fits.row, master, skipped, counted, two["ms"]),
            )


def later(alone: Row, each_step: Row) -> Row:
    """The default after thousands of steps, when intervals are longest; computed."""
    step_ms = alone["ms"]
    cost = (each_step["ms"] - step_ms) / step_ms
    pace = GradientSharing().pace(adaptive=True)
    interval = pace.steps_between(cost, steps_made=10**6)
    ratio = alone["ratio"] * (1 + cost / interval)
    note = f"computed: an exchange in {interval} steps costs {cost:.2f} steps"
    return {
        "case": "the same after thousands of steps",
        "ratio": ratio,
        "note": note,
    }
