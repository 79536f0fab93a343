"""Costs by hand, for tests of what is predicted from them."""

import dataclasses

from daskdl.channel.protocol import WIRE_BYTES
from daskdl.planning.cost_model import Costs, Measured, Network

COSTS = Costs(
    rows=64,
    parameters=1_000_000,
    threads=1,
    gradients_s=0.09,
    optimizer_s=0.01,
    encode_s=0.01,
    apply_s=0.002,
    decode_s=0.001,
    request_s=0.001,
    item_s=0.0001,
    update_bytes=12_500 - WIRE_BYTES,  # 0.1 Mbit with it
    density=1e-3,
)
FAST = Network(bandwidth_bits_per_s=1e9, latency_s=0.0)


def measured(cores=2, **changes) -> Measured:
    return Measured(dataclasses.replace(COSTS, **changes), cores)
