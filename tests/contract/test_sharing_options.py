import dataclasses
import math
import pickle
import re

import pytest

from daskdl.errors import OptionError
from daskdl.residuals import KeepResidual, ResidualClipping
from daskdl.thresholds import AdaptiveThreshold, FixedThreshold
from daskdl.training.gradient_sharing import GradientSharing

WRONG = [
    *[
        (
            "threshold",
            value,
            "must be a daskdl.ThresholdAlgorithm, or a mapping from patterns of "
            "parameter names to such",
        )
        for value in (
            *(1e-3, None, AdaptiveThreshold, {}, {"*": 1e-3}, {1: FixedThreshold()}),
            [("*", FixedThreshold())],
        )
    ],
    ("residual", 5.0, "must be a daskdl.residuals.ResidualPostProcessor"),
    ("residual", None, "must be a daskdl.residuals.ResidualPostProcessor"),
    *[
        ("apply", value, "must be 'eager' or 'strict'")
        for value in ("lazy", None, True, ["eager"])
    ],
    *[
        ("update_scale", value, "must be 'mean', 'sum' or a number > 0")
        for value in (0, -1.0, math.nan, math.inf, True, "max", None, [1.0])
    ],
    *[
        ("max_staleness", value, "must be a whole number >= 0 or None")
        for value in (-1, 1.0, True, "8", [8])
    ],
    *[
        ("exchange_every", value, "must be a whole number >= 1")
        for value in (0, -1, 2.0, True, None, "1")
    ],
    *[
        ("warmup_steps", value, "must be a whole number >= 0")
        for value in (-1, 2.0, True, None, "1")
    ],
    *[
        ("routing", value, "must be 'auto', 'plain' or 'mesh'")
        for value in ("tree", None, ["plain"])
    ],
    *[
        ("replicas_per_worker", value, "must be a whole number >= 1 or 'auto'")
        for value in (0, -2, 1.5, True, None, "all")
    ],
    *[
        ("min_replicas", value, "must be a whole number >= 1")
        for value in (0, 1.5, True, None, "1")
    ],
    *[
        ("rejoin_timeout", value, "must be seconds > 0 or None")
        for value in (0, -1.0, math.nan, math.inf, True, "30s")
    ],
    *[
        ("fan_out", value, "must be a whole number >= 1")
        for value in (0, -1, 2.0, True, None, "8")
    ],
]


def test_the_defaults_are_those_that_are_documented():
    assert GradientSharing() == GradientSharing(
        threshold=AdaptiveThreshold(initial=None),
        residual=ResidualClipping(),
        apply="eager",
        update_scale="mean",
        max_staleness=8,
        exchange_every=1,
        warmup_steps=0,
        routing="auto",
        replicas_per_worker=1,
        min_replicas=1,
        rejoin_timeout=None,
        fan_out=8,
    )


@pytest.mark.parametrize(
    ("option", "value", "allowed"), WRONG, ids=[f"{o}={v!r}" for o, v, _ in WRONG]
)
def test_a_wrong_value_is_refused_by_name(option, value, allowed):
    message = f"{option} {allowed}, got {value!r}"

    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        GradientSharing(**{option: value})


def test_every_option_has_been_given_a_wrong_value():
    names = {field.name for field in dataclasses.fields(GradientSharing)}

    assert {option for option, _, _ in WRONG} == names


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threshold", FixedThreshold(1e-3)),
        ("residual", KeepResidual()),
        ("apply", "strict"),
        ("update_scale", "sum"),
        ("update_scale", 3),
        ("update_scale", 0.5),
        ("max_staleness", None),
        ("max_staleness", 0),
        ("threshold", {"*.bias": FixedThreshold(), "*": AdaptiveThreshold()}),
        ("exchange_every", 4),
        ("warmup_steps", 0),
        ("warmup_steps", 100),
        ("routing", "plain"),
        ("routing", "mesh"),
        ("min_replicas", 4),
        ("rejoin_timeout", 30),
        ("fan_out", 1),
        ("replicas_per_worker", 2),
        ("replicas_per_worker", "auto"),
    ],
    ids=repr,
)
def test_an_allowed_value_is_kept(option, value):
    assert getattr(GradientSharing(**{option: value}), option) == value


@pytest.mark.parametrize(
    ("routing", "workers", "expected"),
    [
        ("auto", 8, "plain"),
        ("auto", 9, "mesh"),
        ("plain", 64, "plain"),
        ("mesh", 2, "mesh"),
    ],
)
def test_auto_is_a_mesh_from_nine_workers_on(routing, workers, expected):
    assert GradientSharing(routing=routing).routing_for(workers) == expected


@pytest.mark.parametrize(
    ("update_scale", "expected"),
    [("mean", 0.125), ("sum", 1.0), (0.3, 0.3), (2, 2.0)],
)
def test_the_learning_rate_of_eight_replicas_is_scaled(update_scale, expected):
    scale = GradientSharing(update_scale=update_scale).scale(8)

    assert scale == expected
    assert type(scale) is float


@pytest.mark.parametrize(
    ("max_staleness", "synchronous"), [(0, True), (1, False), (None, False)]
)
def test_only_a_staleness_of_zero_is_synchronous(max_staleness, synchronous):
    assert GradientSharing(max_staleness=max_staleness).synchronous is synchronous


PER_LAYER = {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold()}


@pytest.mark.parametrize("threshold", [FixedThreshold(), PER_LAYER], ids=["", "layers"])
def test_a_master_travels_and_cannot_be_changed(threshold):
    master = GradientSharing(threshold, apply="strict", update_scale=0.5)

    travelled = pickle.loads(pickle.dumps(master))
    assert (travelled, hash(travelled)) == (master, hash(master))
    with pytest.raises(dataclasses.FrozenInstanceError):
        master.apply = "eager"


def test_a_mapping_that_is_changed_later_changes_no_master():
    mapping = dict(PER_LAYER)
    master = GradientSharing(mapping)

    mapping.clear()

    assert master.threshold == PER_LAYER


def test_the_order_of_the_patterns_matters():
    turned = dict(reversed(PER_LAYER.items()))

    assert GradientSharing(PER_LAYER) != GradientSharing(turned)
    assert GradientSharing(PER_LAYER).threshold != turned
