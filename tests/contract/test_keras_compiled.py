"""What a model is compiled with: losses, optimizers and metrics are those of Keras."""

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.errors import ModelError, OptionError
from daskdl.keras import from_config, from_saved
from daskdl.keras.compiled import (
    CategoricalCrossentropy,
    loss_of,
    optimizer_of,
    resolved_loss,
)
from daskdl.keras.module import library
from tests.support.metric_parts import random

keras = library()
losses = keras.losses
SCORES = random(0, 12, 5)
CHANCES = SCORES.softmax(1)
Y = torch.arange(12) % 5
ONE_HOT = nn.functional.one_hot(Y, 5).float()
STEPS, STEP_LABELS = random(1, 3, 4, 5), torch.arange(12).reshape(3, 4) % 5
BITS = (torch.arange(12) % 3 > 1).float()
NUMBERS = random(2, 12, 1).abs()
POSITIVE = random(3, 12, 1).abs()

# A loss of Keras, outputs and labels.
SPARSE, CATEGORICAL, BINARY = (
    losses.SparseCategoricalCrossentropy,
    losses.CategoricalCrossentropy,
    losses.BinaryCrossentropy,
)
LOSSES = {
    "sparse": ("sparse_categorical_crossentropy", CHANCES, Y),
    "sparse column": ("sparse_categorical_crossentropy", CHANCES, Y[:, None]),
    "sparse floats": ("sparse_categorical_crossentropy", CHANCES, Y.float()),
    "sparse scaled": ("sparse_categorical_crossentropy", CHANCES * 3, Y),
    "sparse certain": ("sparse_categorical_crossentropy", ONE_HOT, Y.flip(0)),
    "sparse logits": (SPARSE(from_logits=True), SCORES, Y),
    "sparse steps": (SPARSE(from_logits=True), STEPS, STEP_LABELS),
    "sparse ignored": (SPARSE(ignore_class=2), CHANCES, Y),
    "categorical": ("categorical_crossentropy", CHANCES, ONE_HOT),
    "categorical integers": (CATEGORICAL(), CHANCES, ONE_HOT.long()),
    "categorical smoothed": (CATEGORICAL(label_smoothing=0.2), CHANCES, ONE_HOT),
    "categorical logits": (
        CATEGORICAL(from_logits=True, label_smoothing=0.1),
        *(STEPS, nn.functional.one_hot(STEP_LABELS, 5).float()),
    ),
    "binary": ("binary_crossentropy", SCORES[:, 0].sigmoid(), BITS),
    "binary column": (BINARY(), SCORES[:, :1].sigmoid(), BITS.long()),
    "binary logits": (
        *(BINARY(from_logits=True, label_smoothing=0.2), SCORES, ONE_HOT),
    ),
    "binary certain": (BINARY(), 1 - BITS, BITS),
    "mse": ("mse", NUMBERS, POSITIVE[:, 0]),
    "mae": (losses.MeanAbsoluteError(), NUMBERS, POSITIVE),
    "huber": (losses.Huber(delta=0.5), 3 * NUMBERS, POSITIVE),
    "poisson": ("poisson", NUMBERS, POSITIVE),
    "function": (losses.mean_squared_error, NUMBERS, POSITIVE),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_is_that_of_keras(case):
    loss_config, output, y = LOSSES[case]
    keras_loss = losses.get(loss_config)
    with keras.device("cpu"):
        expected = keras_loss(y, output)

    loss = loss_of(loss_config)(output, y)

    # Keras clips probabilities in float32, and averages in another order.
    torch.testing.assert_close(loss, expected.mean(), rtol=2e-6, atol=1e-7)
    if case != "huber":  # whose delta Keras does not write
        assert loss_of(losses.serialize(keras_loss))(output, y) == loss


OPTIMIZERS = keras.optimizers
# Settings, and how close: epsilon is within the root in Keras' RMSprop and Adagrad.
UPDATES = [
    (OPTIMIZERS.SGD(0.1), 1e-6),
    (OPTIMIZERS.SGD(0.1, momentum=0.9), 1e-6),
    (OPTIMIZERS.SGD(0.1, momentum=0.9, nesterov=True), 1e-6),
    (OPTIMIZERS.Adam(0.01), 1e-4),
    (OPTIMIZERS.Adam(0.01, beta_1=0.8, beta_2=0.99, amsgrad=True), 1e-4),
    (OPTIMIZERS.Adam(0.01, weight_decay=0.1), 1e-4),
    (OPTIMIZERS.AdamW(0.01, weight_decay=0.1), 1e-4),
    (OPTIMIZERS.Adamax(0.01), 1e-4),
    (OPTIMIZERS.Nadam(0.01), 1e-4),
    (OPTIMIZERS.RMSprop(0.01, rho=0.8, momentum=0.5), 1e-4),
    (OPTIMIZERS.RMSprop(0.01, centered=True), 1e-4),
    (OPTIMIZERS.Adagrad(0.1), 1e-4),
    (OPTIMIZERS.Adadelta(1.0, rho=0.9), 1e-4),
]


@pytest.mark.parametrize(
    ("keras_optimizer", "rtol"), UPDATES, ids=lambda v: type(v).__name__
)
def test_an_optimizer_makes_the_steps_of_keras(keras_optimizer, rtol):
    start, gradients = random(4, 6), random(5, 5, 6) + 2
    with keras.device("cpu"):
        variable = keras.Variable(start.numpy())
        for gradient in gradients:
            keras_optimizer.apply([gradient], [variable])
    parameter = nn.Parameter(start.clone())
    optimizer = optimizer_of(keras.saving.serialize_keras_object(keras_optimizer))(
        [parameter]
    )

    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()

    moved, expected = (
        values.detach() - start for values in (parameter, variable.value)
    )
    torch.testing.assert_close(moved, expected, rtol=rtol, atol=1e-6)


LAYERS = keras.layers
X = random(6, 60, 4).numpy()
KINDS = X[:, :3].argmax(1)


def classifier():
    return keras.Sequential(
        [keras.Input((4,)), LAYERS.Dense(3, activation="softmax", name="kind")]
    )


def compiled(**options):
    model = classifier()
    usual = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"}
    model.compile(**usual | options)
    return model


class TestCompiled:
    def test_a_trainer_needs_nothing_else(self):
        optimizer = OPTIMIZERS.SGD(0.5, momentum=0.9)
        model = compiled(optimizer=optimizer, metrics=["accuracy", "AUC"])

        trainer = daskdl.Trainer(model, client=False)
        trainer.fit(X, KINDS[:, None], epochs=20)  # labels as those of CIFAR-10
        values = trainer.evaluate(X, KINDS[:, None])

        group = trainer.optimizer_.param_groups[0]
        assert (group["lr"], group["momentum"]) == (0.5, 0.9)
        assert set(values) == {"loss", "accuracy", "roc_auc"}
        assert values["accuracy"] > 0.8
        keras_model = compiled(metrics=["accuracy"])
        keras_model.set_weights(trainer.model_.get_weights())
        expected = keras_model.evaluate(X, KINDS, verbose=0, return_dict=True)
        assert values["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert values["accuracy"] == pytest.approx(expected["accuracy"])
        chances = trainer.predict_proba(X)
        np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-5)

    def test_validation_has_an_accuracy(self):
        trainer = daskdl.Trainer(compiled(), client=False)

        history = trainer.fit(X, KINDS, validation=(X, KINDS[:, None]))

        right = trainer.evaluate(X, KINDS)["accuracy"]
        assert history.column("val_accuracy") == [pytest.approx(right)]

    def test_arguments_of_a_loss_are_kept(self):
        model = keras.Sequential([keras.Input((4,)), LAYERS.Dense(1)])
        model.compile("sgd", losses.Huber(delta=0.25))

        assert daskdl.Trainer(model, client=False).loss.delta == 0.25

    def test_arguments_have_precedence(self):
        trainer = daskdl.Trainer(
            compiled(metrics=["accuracy"]),
            nn.NLLLoss(),
            torch.optim.SGD,
            metrics=["f1"],
            client=False,
        )

        assert isinstance(trainer.loss, nn.NLLLoss)
        assert (trainer.optimizer, trainer.metrics) == (torch.optim.SGD, ["f1"])

    @pytest.mark.parametrize("ending", ["keras", "h5", "json"])
    def test_a_file_has_it_too(self, tmp_path, ending):
        loss = SPARSE(from_logits=False, name="own")
        model = compiled(loss=loss, metrics=["acc", keras.metrics.AUC(name="x")])
        path = tmp_path / f"model.{ending}"
        if ending == "json":
            path.write_text(model.to_json())
            module = from_config(path)
        else:
            model.save(path)
            module = from_saved(path)

        trainer = daskdl.Trainer(module, client=False)

        assert trainer.metrics == ["acc", "roc_auc"]
        assert trainer.loss(torch.from_numpy(X).softmax(1), torch.from_numpy(KINDS)) > 0
        assert trainer.optimizer.keywords["lr"] == 0.001
        if ending != "json":
            for loaded, saved in zip(
                module.get_weights(), model.get_weights(), strict=True
            ):
                np.testing.assert_array_equal(loaded, saved)

    def test_the_loss_is_saved_with_the_trainer(self, tmp_path):
        trainer = daskdl.Trainer(compiled(metrics=["accuracy"]), client=False)
        trainer.fit(X, KINDS)

        trainer.save(tmp_path)
        again = daskdl.Trainer.load(tmp_path, client=False)

        assert again.evaluate(X, KINDS) == trainer.evaluate(X, KINDS)
        assert again.metrics == ["accuracy"]

    @pytest.mark.parametrize("named", [False, True], ids=["tuple", "dict"])
    @pytest.mark.parametrize("labels", ["tuple", "dict"])
    def test_each_output_has_its_loss_and_metrics(self, named, labels):
        first = keras.Input((4,))
        kind = LAYERS.Dense(3, activation="softmax", name="kind")(first)
        size = LAYERS.Dense(1, name="size")(first)
        outputs = {"kind": kind, "size": size} if named else [kind, size]
        model = keras.Model(first, outputs)
        model.compile(
            "sgd",
            {"kind": "sparse_categorical_crossentropy", "size": "mse"},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
            loss_weights={"kind": 1.0, "size": 0.5},
        )
        y = {"kind": KINDS[:, None], "size": X[:, 3]}
        y = y if labels == "dict" else tuple(y.values())
        trainer = daskdl.Trainer(model, client=False)
        trainer.fit(X, y, validation=(X, y))

        values = trainer.evaluate(X, y)

        targets = {"kind": KINDS, "size": X[:, 3]}
        targets = targets if named else list(targets.values())
        model.set_weights(trainer.model_.get_weights())
        expected = model.evaluate(X, targets, verbose=0, return_dict=True)
        assert values["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert set(values) == {"loss", "kind_accuracy", "size_mae"}
        assert values["kind_accuracy"] == pytest.approx(expected["kind_accuracy"])
        assert values["size_mae"] == pytest.approx(expected["size_mae"], rel=1e-5)
        validated = trainer.history_[0]
        for name, value in values.items():
            assert validated[f"val_{name}"] == pytest.approx(value, rel=1e-5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"loss": "mape"},
                r"loss 'mape' is not among the known names .*=lambda p, y: 100 \*",
            ),
            (
                {"loss": "log_cosh"},
                r"pass loss=lambda p, y: \(p - y\).cosh\(\).log\(\).mean\(\)",
            ),
            (
                {"loss": BINARY(reduction="sum")},
                "'BinaryCrossentropy' has reduction='sum'.* pass a function of",
            ),
            ({"loss": lambda y, p: p}, "loss '.*lambda.*' is not among the known"),
            (
                {"optimizer": OPTIMIZERS.Ftrl()},
                r"optimizer 'Ftrl' must be one of SGD, .* pass Trainer\(optimizer=",
            ),
            (
                {"optimizer": OPTIMIZERS.Adam(OPTIMIZERS.schedules.CosineDecay(1, 9))},
                r"learning rate CosineDecay; pass Trainer\(optimizer=..., scheduler=",
            ),
            (
                {"optimizer": OPTIMIZERS.SGD(weight_decay=0.1)},
                "'SGD' has weight_decay=0.1, which has no counterpart here",
            ),
            (
                {"optimizer": OPTIMIZERS.SGD(global_clipnorm=1.0)},
                r"has global_clipnorm=1.0; pass .*clip_grad_norm=...\)",
            ),
            (
                {"metrics": [keras.metrics.Precision(thresholds=0.3)]},
                r"'Precision' has the thresholds \[?0.3.*BinaryMetrics\(threshold=",
            ),
        ],
    )
    def test_what_has_no_counterpart_is_refused(self, options, message):
        with pytest.raises(OptionError, match=message):
            daskdl.Trainer(compiled(**options), client=False)


class TestNames:
    @pytest.mark.parametrize("loss", ["cross_entropy", "CrossEntropyLoss"])
    def test_a_model_of_torch_takes_a_loss_by_name(self, loss):
        model = nn.Linear(4, 3)
        trainer = daskdl.Trainer(model, loss, torch.optim.SGD, client=False)
        trainer.fit(X, KINDS)

        values = trainer.evaluate(X, KINDS)

        expected = daskdl.evaluate(
            trainer.model_, X, KINDS, loss=nn.CrossEntropyLoss(), client=False
        )
        assert values == expected
        by_name = daskdl.evaluate(trainer.model_, X, KINDS, loss=loss, client=False)
        assert by_name == expected

    def test_scores_are_not_taken_for_probabilities(self):
        loss = "sparse_categorical_crossentropy"
        model = nn.Linear(4, 3)
        nn.init.constant_(model.bias, -9.0)
        trainer = daskdl.Trainer(model, loss, "sgd", client=False)

        with pytest.raises(
            ModelError, match=r"got outputs down to -.*, or from_logits"
        ):
            trainer.fit(X, KINDS)

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(OptionError, match="did you mean 'cross_entropy'"):
            daskdl.Trainer(nn.Linear(4, 3), "crossentropi", torch.optim.SGD)

    def test_a_sum_over_the_rows_is_no_part_of_several_losses(self):
        loss = {"kind": nn.CrossEntropyLoss(reduction="sum"), "size": "mse"}

        with pytest.raises(OptionError, match=r"loss\['kind'\] must be a mean"):
            daskdl.Trainer(nn.Linear(4, 3), loss, "sgd", client=False)

    def test_weights_of_each_loss_move_to_the_device_with_it(self):
        loss = {"kind": nn.CrossEntropyLoss(weight=torch.ones(3)), "size": "mse"}

        assert len(list(resolved_loss(loss).buffers())) == 1

    def test_class_indices_are_smoothed_as_one_hot_labels_are(self):
        loss = CategoricalCrossentropy(label_smoothing=0.5)
        shares, y = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([0])

        assert loss(shares, y) == loss(shares, nn.functional.one_hot(y, 3))
        assert loss(shares, y) > -torch.log(torch.tensor(0.7))

    def test_several_outputs_have_the_sum_of_their_losses(self):
        loss = {"kind": nn.CrossEntropyLoss(), "size": "mse"}
        output = {"kind": SCORES, "size": NUMBERS}
        y = {"kind": Y, "size": POSITIVE[:, 0]}

        values = daskdl.evaluate(
            *(nn.Identity(), output, y),
            loss=loss,
            metrics={"kind": "accuracy"},
            client=False,
        )

        parts = loss["kind"](SCORES, Y), nn.MSELoss()(NUMBERS, POSITIVE)
        assert values["loss"] == pytest.approx(sum(parts).item(), rel=1e-5)
        right = (SCORES.argmax(1) == Y).double().mean().item()
        assert values["kind_accuracy"] == pytest.approx(right)
        with pytest.raises(
            ModelError, match="labels must be a tuple of 2, or a dict wi"
        ):
            daskdl.evaluate(nn.Identity(), output, Y, loss=loss, client=False)


# ---- files of Keras 2

MODEL = """
{"class_name": "Sequential", "config": {"name": "s", "layers": [
  {"class_name": "Dense", "config": {"name": "kind", "trainable": true, "units": 3,
    "batch_input_shape": [null, 4], "dtype": "float32", "activation": "softmax"}},
  {"class_name": "BatchNormalization", "config": {"name": "norms", "axis": [1],
    "momentum": 0.9, "epsilon": 0.001}}]}}
"""
TRAINING = """
{"loss": {"class_name": "SparseCategoricalCrossentropy",
    "config": {"reduction": "auto", "name": "l", "from_logits": false}},
  "metrics": [[{"class_name": "MeanMetricWrapper", "config": {"name": "accuracy",
    "dtype": "float32", "fn": "sparse_categorical_accuracy"}}]],
  "weighted_metrics": null, "loss_weights": null,
  "optimizer_config": {"class_name": "Adam", "config": {"name": "Adam",
    "learning_rate": 0.0020000000949949026, "decay": 0.0, "beta_1": 0.9,
    "beta_2": 0.999, "epsilon": 1e-07, "amsgrad": false}}}
"""
WEIGHTS = {
    "kind": {"kernel:0": random(7, 4, 3).numpy(), "bias:0": random(8, 3).numpy()},
    "norms": {
        name: np.full(3, value, "f4") for name, value in (("gamma:0", 2), ("beta:0", 1))
    }
    | {
        name: np.full(3, value, "f4")
        for name, value in (("moving_mean:0", 0.5), ("moving_variance:0", 4))
    },
}


def written_by_keras_2(path):
    """A whole model as Keras 2.4 saved it."""
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"], file.attrs["backend"] = "2.4.0", "tensorflow"
        file.attrs["model_config"], file.attrs["training_config"] = MODEL, TRAINING
        weights = file.create_group("model_weights")
        weights.attrs["layer_names"] = [name.encode() for name in WEIGHTS]
        weights.attrs["backend"], weights.attrs["keras_version"] = b"tensorflow", b"2.4"
        for layer, arrays in WEIGHTS.items():
            group = weights.create_group(layer)
            group.attrs["weight_names"] = [
                f"{layer}/{name}".encode() for name in arrays
            ]
            for name, values in arrays.items():
                group[f"{layer}/{name}"] = values
        file["optimizer_weights/Adam/iter:0"] = 7
    return path


class TestHdf5:
    def test_a_whole_model_of_keras_2_is_loaded(self, tmp_path):
        module = from_saved(written_by_keras_2(tmp_path / "old.hdf5")).eval()

        x = torch.from_numpy(X)
        kernel, bias = (torch.from_numpy(array) for array in WEIGHTS["kind"].values())
        chances = (x @ kernel + bias).softmax(1)
        expected = (chances - 0.5) / (4 + 0.001) ** 0.5 * 2 + 1
        torch.testing.assert_close(module(x), expected)
        trainer = daskdl.Trainer(module, client=False)
        assert trainer.optimizer.func is torch.optim.Adam
        assert trainer.optimizer.keywords["lr"] == 0.002
        assert trainer.metrics == ["sparse_categorical_accuracy"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda f: f.attrs.pop("model_config"),
                "contains no model, .*load_weights",
            ),
            (
                lambda f: f.attrs.update(model_config="{"),
                "model_config is not valid JSON",
            ),
            (lambda f: f.attrs.update(model_config=3), "model_config must be text"),
            (lambda f: f.pop("model_weights"), "do not fit its model"),
            (
                lambda f: f.update({"model_weights/x": h5py.ExternalLink("a", "b")}),
                "'model_weights/x' is a ExternalLink",
            ),
        ],
        ids=["weights", "JSON", "number", "no weights", "link"],
    )
    def test_other_files_are_refused(self, tmp_path, change, message):
        path = written_by_keras_2(tmp_path / "other.h5")
        with h5py.File(path, "r+") as file:
            change(file)

        with pytest.raises(ModelError, match=message):
            from_saved(path)

    def test_damaged_files_and_other_endings_are_refused(self, tmp_path):
        (tmp_path / "x.h5").write_bytes(b"no HDF5 at all")

        with pytest.raises(
            ModelError, match=r"x.h5 is not an HDF5 file, or is damaged"
        ):
            from_saved(tmp_path / "x.h5")
        with pytest.raises(
            ModelError, match=r"must end in '.keras', '.h5' or '.hdf5', got"
        ):
            from_saved(tmp_path / "x.pb")
