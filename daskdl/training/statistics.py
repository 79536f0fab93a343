"""What an exchange did, in one step and in one epoch.

Plain numbers; :mod:`daskdl.training.observer` counts them.
"""

import math
from typing import NamedTuple


class Statistics(NamedTuple):
    """What an exchange did in one epoch."""

    exchanges: int
    density_sum: float  # entries sent / parameters, summed over exchanges
    threshold: float  # the last one, parameter units; of several the mean; or NaN
    clipped: float  # mass removed by clipping
    lead_sum: int  # steps ahead of the slowest, summed over steps
    steps: int
    frozen_bytes: int = 0  # sent to all at the last meeting, see `Frozen`


class Exchanged(NamedTuple):
    """What an exchange did in one step, and what it left; see `steps.STEP_COLUMNS`."""

    threshold: float = math.nan
    density: float = math.nan
    sent_bytes: int = 0
    kind: str | None = None
    residual_norm: float = math.nan
    residual_p50: float = math.nan
    residual_p90: float = math.nan
    residual_p99: float = math.nan
    staleness: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    apply_s: float = 0.0
