"""Who is measured side by side: the script of each, and its options."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Contestant:
    """A way of training.

    Attributes:
        name: In tables.
        script: Module of `benchmarks.peers`.
        options: Of the script.
        alone: Whether it is one process, whatever the number of hosts.
        shares: Whether its processes train one model.
        kept: Whether freed memory is kept for the next step, as daskdl keeps it.
    """

    name: str
    script: str
    options: tuple[str, ...] = ()
    alone: bool = False
    shares: bool = True
    kept: bool = False


SINGLE = "plain, one process"
INDEPENDENT = "plain, independent processes"
KEPT = "plain, freed memory kept"

CONTESTANTS = {
    key: Contestant(*rest)
    for key, *rest in (
        ("single", SINGLE, "plain", (), True, False),
        ("independent", INDEPENDENT, "plain", (), False, False),
        ("independent-kept", KEPT, "plain", (), False, False, True),
        ("ddp", "DDP, gloo", "ddp"),
        ("ddp-fp16", "DDP, fp16 hook", "ddp", ("--hook=fp16",)),
        ("ddp-powersgd", "DDP, PowerSGD rank 1", "ddp", ("--hook=powersgd",)),
        ("post-local-sgd", "post-local SGD, every 16", "post_local"),
        ("torchft-local-sgd", "torchft LocalSGD, every 16", "fault_tolerant"),
        (
            "torchft-diloco",
            "torchft DiLoCo, every 16",
            "fault_tolerant",
            ("--rule=diloco",),
        ),
        ("hivemind-16", "hivemind, every 16", "hive"),
        ("hivemind-256", "hivemind, every 256", "hive", ("--every=256",)),
        ("ray-train", "Ray Train", "ray_train"),
        ("daskdl", "daskdl, exchange_every=1", "own"),
        ("daskdl-16", "daskdl, exchange_every=16", "own", ("--every=16",)),
        (
            "daskdl-averaging",
            "daskdl, averaging every 16",
            "own",
            ("--way=averaging", "--every=16"),
        ),
    )
}
