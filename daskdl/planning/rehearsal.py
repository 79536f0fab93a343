"""Costs of a replica on this machine, as means over rehearsed steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from daskdl.data.rehearsal import random_state_left_alone
from daskdl.planning.costs import Costs
from daskdl.planning.idle_worker import idle_worker
from daskdl.planning.requests import request_costs
from daskdl.planning.scene import Scene, Script, Times
from daskdl.serialization import Packed
from daskdl.training.replica import process_environment

WARM_STEPS = 2  # the first compile, and allocate
LEAST_STEPS, MOST_STEPS = 3, 200
TIMED_S = 2.5  # how long steps are timed, unless too few were


@contextmanager
def prepared(script: Packed[Script]) -> Iterator[Scene]:
    """Set the scene, with the first steps made and thresholds settled.

    Beside it is an idle Dask worker, as beside a replica.

    The process is as it was afterwards: torch's threads, all generators.

    Args:
        script: A copy of it is rehearsed.
    """
    own = script.unpack()
    with (
        random_state_left_alone(),
        process_environment(own.device, own.threads) as device,
        idle_worker(),
    ):
        scene = Scene(own, device)
        for _ in range(WARM_STEPS):
            scene.step()
        scene.settle()
        yield scene


def rehearse(script: Packed[Script]) -> Costs:
    """Rehearse for about four seconds, or six exchanges, if these take longer.

    Args:
        script: A copy of it is rehearsed.

    Raises:
        DivergedError: If the loss is not finite.
    """
    with prepared(script) as scene:
        return measure(scene)


def measure(scene: Scene) -> Costs:
    """The costs of a prepared scene; steps go on while requests are measured.

    Raises:
        DivergedError: If the loss is not finite.
    """
    # Means: medians would not see the pauses that others' work on the same cores makes,
    # and if many exchanges send nothing, they would forget those that do.
    parts = np.mean(_timed(scene), axis=0).tolist()
    costs = dict(zip(Times._fields, parts, strict=True))
    frame = np.zeros(max(1, round(costs["update_bytes"])), np.uint8)
    return Costs(
        rows=scene.rows,
        parameters=scene.parameters,
        threads=scene.threads,
        **costs,
        **request_costs(frame, scene.step)._asdict(),
    )


def _timed(scene: Scene) -> list[Times]:
    times: list[Times] = []
    deadline = time.perf_counter() + TIMED_S
    while len(times) < LEAST_STEPS or (
        len(times) < MOST_STEPS and time.perf_counter() < deadline
    ):
        times.append(scene.step())
    return times
