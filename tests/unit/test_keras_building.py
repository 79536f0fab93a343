"""Models are made of descriptions, and what is wrong with these is said."""

import random

import pytest
import torch

from daskdl.errors import ModelError
from daskdl.keras.module import built, described, library

keras = library()


def model(**options):
    layers = [keras.Input((4,)), keras.layers.Dense(3, **options)]
    return keras.Sequential(layers, name="own")


def kernel_of(config, seed):
    torch.manual_seed(seed)
    return torch.from_numpy(built(config, seeded=True).get_weights()[0])


def test_torchs_generator_decides_the_weights():
    config = described(model())

    first, again, other = (kernel_of(config, seed) for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_pythons_generator_is_left_as_it_was():
    config = described(model())
    before = random.getstate()

    built(config, seeded=True)
    built(config, seeded=False)

    assert random.getstate() == before


def test_torchs_generator_is_left_alone_where_weights_do_not_matter():
    config = described(model())
    before = torch.get_rng_state()

    built(config, seeded=False)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_description_that_was_used_can_be_used_again():
    config = described(model())

    first, second = (built(config, seeded=False) for _ in range(2))

    assert first.to_json() == second.to_json()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": -3}, "-3"),
        ({"nonsense": 1}, "nonsense"),
        ({"activation": "nonsense"}, "nonsense"),
        ({"units": "many"}, "many"),
    ],
    ids=str,
)
def test_what_keras_cannot_make_is_said(settings, message):
    config = described(model())
    config["config"]["layers"][1]["config"].update(settings)

    with pytest.raises(ModelError, match=f"cannot make the model: .*{message}"):
        built(config, seeded=False)


def test_a_layer_is_no_model():
    config = described(model())["config"]["layers"][1]

    with pytest.raises(ModelError, match="expected a model"):
        built(config, seeded=False)
