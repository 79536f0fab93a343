"""A Keras model is a module like any other, and saved as Keras saves it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.compression.flat import FLOATING, Untrained
from daskdl.errors import ModelError
from daskdl.keras import CrossEntropyOfProbabilities
from daskdl.keras.module import KerasModule, built, described, library
from daskdl.serialization import PackedModel
from tests.support.keras_models import small

keras = library()
layers = keras.layers
ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def normalised(**options):
    """A model with batch normalisation and dropout."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, name="first", **options),
            layers.BatchNormalization(name="normal"),
            layers.Dropout(0.5),
            layers.Dense(2, name="last"),
        ],
        name="normalised",
    )


def everything():
    """A model of all that is awkward."""
    text = keras.Input((5,), dtype="int32", name="text")
    image = keras.Input((8, 8, 3), name="image")
    shared = layers.Dense(3, name="shared")
    inner = keras.Sequential(
        [keras.Input((3,)), layers.Dense(3), layers.BatchNormalization()], name="inner"
    )
    words = layers.Embedding(10, 4, mask_zero=True)(text)
    words = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(words)
    seen = layers.MultiHeadAttention(2, 2)(words, words)
    words = shared(layers.GRU(3)(layers.LayerNormalization()(words + seen)))
    patch = layers.SeparableConv2D(3, 3, activation=layers.ReLU())(image)
    patch = layers.GaussianNoise(0.1)(layers.PReLU()(patch))
    patch = inner(shared(layers.GlobalAveragePooling2D()(patch)))
    return keras.Model(
        {"text": text, "image": image},
        {"sum": layers.Add()([words, inner(patch)]), "first": patch[:, :1] * 2},
    )


def inputs_of_everything():
    draw = torch.Generator().manual_seed(1)
    return {
        "text": torch.randint(0, 10, (3, 5), generator=draw),
        "image": torch.randn(3, 8, 8, 3, generator=draw),
    }


def adapted(rows, dtype):
    """A model that subtracts what it has seen to be the mean of its inputs."""
    layer = layers.Normalization(dtype=dtype, name="centred")
    layer.adapt(rows.numpy())
    return keras.Sequential([keras.Input((4,)), layer])


def moving_mean(module):
    return dict(module.named_buffers())["normal/moving_mean"]


class TestParts:
    def test_trained_weights_are_parameters_and_others_are_buffers(self):
        module = KerasModule(normalised())

        trained = [
            f"{layer}/{name}"
            for layer, names in (
                ("first", ("kernel", "bias")),
                ("normal", ("gamma", "beta")),
                ("last", ("kernel", "bias")),
            )
            for name in names
        ]
        statistics = ["normal/moving_mean", "normal/moving_variance"]
        assert [name for name, _ in module.named_parameters()] == trained
        assert [name for name, _ in module.named_buffers()] == statistics

    def test_parameters_of_layers_with_one_name_have_different_names(self):
        cells = [layers.SimpleRNNCell(2, name="cell") for _ in range(2)]
        model = keras.Sequential([keras.Input((3, 4)), layers.RNN(cells, name="rnn")])

        names = [name for name, _ in KerasModule(model).named_parameters()]

        assert [name for name in names if "bias" in name] == [
            "rnn/stacked_rnn_cells/cell/bias",
            "rnn/stacked_rnn_cells/cell/bias_",
        ]


class TestModes:
    def test_evaluation_is_what_keras_predicts_and_only_training_changes_statistics(
        self,
    ):
        module = KerasModule(normalised())
        before = moving_mean(module).clone()

        with torch.inference_mode():
            outputs = module.eval()(ROWS).numpy()
        by_keras = module.predict(ROWS.numpy(), verbose=0)
        still = moving_mean(module).clone()
        module.train()(ROWS)

        np.testing.assert_array_equal(outputs, by_keras)
        assert torch.equal(before, still)
        assert not torch.equal(before, moving_mean(module))

    @pytest.mark.parametrize(
        "layer",
        [layers.Dropout(0.5, seed=3), layers.GaussianNoise(1.0)],
        ids=["seeded", "noise"],
    )
    def test_random_layers_use_torchs_generator(self, layer):
        model = keras.Sequential([keras.Input((4, 64)), layer, layers.Dense(1)])
        module, copied = KerasModule(model), PackedModel(KerasModule(model)).unpack()
        rows = torch.ones(2, 4, 64)

        def drawn(dropping, seed):
            torch.manual_seed(seed)
            return [dropping(rows), dropping(rows)]

        first, second = drawn(module, 0)
        again, _ = drawn(copied.train(), 0)
        reseeded, _ = drawn(copied, 1)

        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert not torch.equal(first, reseeded)


class TestSharedMemory:
    def test_buffers_are_those_of_keras(self):
        module = KerasModule(normalised()).double()
        untrained = Untrained(module)

        untrained.load_({FLOATING: untrained.take()[FLOATING] + 2.0})

        mean, variance = module.keras.get_layer("normal").get_weights()[2:]
        assert (mean == 2.0).all()
        assert (variance == 3.0).all()

    def test_normalisation_follows_its_weights(self):
        module, restored = (
            KerasModule(adapted(ROWS + n, "mixed_bfloat16")) for n in (3, 5)
        )

        restored.load_state_dict(module.state_dict())

        assert torch.equal(restored(ROWS), module(ROWS))


class TestPickling:
    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda module: PackedModel(module).unpack()],
        ids=["deepcopy", "packed"],
    )
    def test_a_copy_computes_the_same_in_its_own_memory(self, copied):
        module = KerasModule(everything()).eval()
        x = inputs_of_everything()

        copy = copied(module)
        outputs, of_copy = module(x), copy(x)

        assert not copy.training
        assert outputs.keys() == of_copy.keys() == {"sum", "first"}
        assert all(torch.equal(outputs[name], of_copy[name]) for name in outputs)
        assert [n for n, _ in copy.named_parameters()] == [
            n for n, _ in module.named_parameters()
        ]
        pairs = zip(copy.parameters(), module.parameters(), strict=True)
        assert all(
            tensor.data_ptr() != copied_tensor.data_ptr()
            for tensor, copied_tensor in pairs
        )

    def test_frozen_layers_are_frozen_in_a_copy(self):
        module = KerasModule(normalised())
        module.keras.get_layer("normal").trainable = False

        unpacked = PackedModel(module).unpack()
        before = moving_mean(unpacked).clone()
        unpacked.train()(ROWS)

        assert [n for n, p in unpacked.named_parameters() if not p.requires_grad] == [
            "normal/gamma",
            "normal/beta",
        ]
        assert torch.equal(before, moving_mean(unpacked))

    def test_shared_layers_stay_shared(self):
        shared, rows = layers.Dense(4), keras.Input((4,))
        module = KerasModule(keras.Model(rows, [shared(rows), shared(shared(rows))]))

        duplicate = copy.deepcopy(module)

        assert len(list(duplicate.parameters())) == len(list(module.parameters())) == 2

    def test_sharing_that_keras_does_not_describe_is_refused(self):
        dense, steps = layers.Dense(2), keras.Input((3, 4))
        wrapped = [layers.TimeDistributed(dense)(steps) for _ in range(2)]
        module = KerasModule(keras.Model(steps, wrapped))

        with pytest.raises(ModelError, match="has 2 weights, but 4 after Keras"):
            copy.deepcopy(module)


class TestStructure:
    @pytest.mark.parametrize("named", [False, True])
    def test_several_inputs_are_a_tuple_or_a_dict(self, named):
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        model = keras.Model([left, right], [left - 2 * right, layers.Dense(1)(left)])
        inputs = {"right": ROWS, "left": ROWS} if named else (ROWS, ROWS)

        outputs = KerasModule(model)(inputs)

        assert isinstance(outputs, tuple)
        assert torch.equal(outputs[0], -ROWS)


class TestPenalty:
    def test_the_penalty_is_that_of_the_last_forward_pass(self):
        both = {"kernel_regularizer": keras.regularizers.L2(0.5)}
        model = normalised(activity_regularizer="l2", **both)
        module = KerasModule(model)
        kernel = dict(module.named_parameters())["first/kernel"]

        module(ROWS + 1)
        module(ROWS)
        penalty = module.penalty()
        penalty.backward()

        model(ROWS)  # newer versions divide the penalty of activities by the rows
        weights = model.get_layer("first").kernel.value
        expected = sum(model.losses)
        assert expected > 0.5 * weights.square().sum()
        torch.testing.assert_close(penalty, expected)
        (gradient,) = torch.autograd.grad(expected, weights)
        torch.testing.assert_close(kernel.grad, gradient)


class Mine(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = layers.Dense(2)

    def call(self, x):
        return self.last(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Mine(), "Mine"),
        (keras.Sequential([layers.Dense(2)]), r"start the model with a keras\.Input"),
    ],
    ids=["own", "shapeless"],
)
def test_a_model_that_cannot_be_copied_is_refused(model, message):
    if isinstance(model, Mine):
        model(ROWS)

    with pytest.raises(ModelError, match=message):
        KerasModule(model)


def model(**options):
    layers = [keras.Input((4,)), keras.layers.Dense(3, **options)]
    return keras.Sequential(layers, name="own")


def test_random_generators_are_restored():
    config = described(model())
    before = random.getstate(), torch.get_rng_state()

    built(config, seeded=False)
    after = torch.get_rng_state()
    built(config, seeded=True)

    assert random.getstate() == before[0]
    assert torch.equal(after, before[1])


def test_errors_of_keras_are_reported():
    config = described(model())
    config["config"]["layers"][1]["config"]["units"] = -3

    with pytest.raises(ModelError, match=r"cannot create the model: .*-3"):
        built(config, seeded=False)


SCORES = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"weight": torch.tensor([1.0, 2.0, 3.0])}],
    ids=["sum", "weighted mean"],
)
def test_the_loss_equals_the_cross_entropy_of_the_scores(options):
    expected = nn.CrossEntropyLoss(**options)(SCORES, LABELS)

    loss = CrossEntropyOfProbabilities(**options)(SCORES.softmax(1), LABELS)

    torch.testing.assert_close(loss, expected)


def test_a_probability_of_zero_has_a_finite_loss():
    certain = torch.tensor([[0.0, 1.0]])

    loss = CrossEntropyOfProbabilities()(certain, torch.tensor([0]))

    assert 16 < loss < 17


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path, model = tmp_path / "own.keras", small()
    path.write_bytes(b"before")

    def full(partial):
        partial.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(model.keras, "save", full)
    with pytest.raises(OSError, match="no space left"):
        model.save(path)

    assert path.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["own.keras"]
