"""Plausible mistakes: each message says what was wrong and what to type instead."""

import functools
import inspect
import re

import numpy as np
import pytest
import torch
from distributed import Client
from distributed.deploy import Cluster
from torch import nn, optim

import daskdl
from daskdl import GradientSharing, Trainer

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def sgd(params):
    return optim.SGD(params, lr=0.1)


def trainer(model=None, loss=None, optimizer=sgd, **options):
    options = {"client": False, "progress": False} | options
    if "step" not in options:
        loss = nn.CrossEntropyLoss() if loss is None else loss
    return Trainer(model or nn.Linear(4, 2), loss, optimizer, **options)


def fit(*data, model=None, loss=None, optimizer=sgd, options=None, **arguments):
    data = data or (X, Y)
    trainer(model, loss, optimizer, **(options or {})).fit(*data, **arguments)


def sharing(**options):
    fit(options={"master": GradientSharing(**options)})


class NoCluster(Cluster):
    """Looks like one."""

    def __init__(self):
        pass

    def __repr__(self):
        return "NoCluster()"

    def __del__(self):
        pass


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.requires_grad_(False)


class OfLogits(nn.NLLLoss):
    def forward(self, output, y):
        return super().forward(output.log_softmax(1), y)


def positive():
    """A model whose outputs are no log probabilities."""
    model = nn.Linear(4, 2)
    nn.init.constant_(model.bias, 9.0)
    return model


def own_step(model, batch):
    x, _ = batch
    return model(x).square().mean()


def others(params):
    return optim.SGD([*params, *nn.Linear(4, 2).parameters()], lr=0.1)


MISTAKES = {
    # ---- the trainer
    "an optimizer of other parameters": (lambda: fit(optimizer=others), "params"),
    "a model's class that needs arguments": (
        lambda: fit(model=nn.Linear),
        "lambda: Linear(...)",
    ),
    "a loss class": (lambda: fit(loss=nn.CrossEntropyLoss), "CrossEntropyLoss()"),
    "a loss of log probabilities for logits": (
        lambda: fit(model=positive(), loss=nn.NLLLoss()),
        "nn.LogSoftmax(dim=1), or take nn.CrossEntropyLoss()",
    ),
    "labels of which the first is missing": (
        lambda: fit(X, [None, *Y[1:].tolist()], options={"step": own_step}),
        "y must all have one shape: a value is None",
    ),
    "a loss without gradient": (
        lambda: fit(loss=lambda out, y: (out.argmax(1) == y).float().mean()),
        "without argmax",
    ),
    "an address for a client": (
        lambda: trainer(client="tcp://10.0.0.1:8786"),
        "Client('tcp://10.0.0.1:8786')",
    ),
    "a cluster for a client": (
        lambda: trainer(client=NoCluster()),
        "Client(cluster)",
    ),
    "a client's class": (
        lambda: trainer(client=Client),
        "a distributed.Client",
    ),
    "a short name of a metric to monitor": (
        lambda: trainer(callbacks=[daskdl.EarlyStopping("val_acc")]),
        "such as 'val_accuracy'",
    ),
    "the same with a mode": (
        lambda: fit(
            validation=(X, Y),
            options={"callbacks": [daskdl.EarlyStopping("val_acc", mode="max")]},
        ),
        "got 'val_acc'; did you mean 'val_accuracy'? Or to log it",
    ),
    "no callback": (lambda: trainer(callbacks=3), "or a list of them, got 3"),
    "nothing to train": (lambda: fit(model=Frozen()), "requires_grad"),
    # ---- a fit and its results
    "validation without labels": (lambda: fit(validation=X), "pairs (x, y)"),
    "a resume without checkpoints": (
        lambda: fit(resume=True),
        "a Checkpoint among the callbacks",
    ),
    "more replicas than there are": (
        lambda: sharing(min_replicas=3),
        "replicas_per_worker",
    ),
    "a prediction before a fit": (lambda: trainer().predict(X), "fit"),
    "an evaluation before a fit": (lambda: trainer().evaluate(X, Y), "fit"),
    "a save before a fit": (lambda: trainer().save("/tmp/nowhere"), "fit"),
    "a metric of numbers for classes": (
        lambda: fitted().evaluate(X, Y, metrics="mse"),
        "for classes use 'accuracy' or 'f1'",
    ),
}


def fitted():
    failing = trainer()
    failing.fit(X, Y)
    return failing


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_says_what_to_type_instead(name):
    mistake, words = MISTAKES[name]

    with pytest.raises(daskdl.DaskDLError) as caught:
        mistake()

    assert words in str(caught.value)


@pytest.fixture
def distributed():
    """A module in DistributedDataParallel, in a group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("path", ["model", r"model\.0"])
def test_distributed_data_parallel_is_refused(distributed, path):
    model = distributed if path == "model" else nn.Sequential(distributed)
    message = rf"^{path} is a DistributedDataParallel.*use {path}\.module"

    for use in (
        lambda: fit(model=model),
        lambda: fit(model=lambda: model),
        lambda: daskdl.evaluate(model, X, Y, client=False),
        lambda: daskdl.predict(model, X, client=False),
    ):
        with pytest.raises(daskdl.ModelError, match=message):
            use()

    fit(model=distributed.module)


def test_a_softmax_before_a_loss_of_logits_is_noticed():
    model = nn.Sequential(nn.Linear(4, 2), nn.Softmax(dim=1))

    with pytest.warns(UserWarning, match="CrossEntropyLoss expects logits, .* add up"):
        fit(model=model)


def test_a_subclass_of_a_loss_may_convert_its_scores():
    fit(model=positive(), loss=OfLogits())


class Uncertain(nn.Module):
    """A loss whose weight is learnt."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(1))

    def forward(self, output, y):
        loss = nn.functional.cross_entropy(output, y)
        return (loss * torch.exp(-self.log_variance) + self.log_variance).sum()


UNCERTAIN = Uncertain()
WEIGHT = torch.ones(1, requires_grad=True)


def closure():
    criterion = Uncertain()
    return lambda output, y: criterion(output, y)


def of_global(output, y):
    return UNCERTAIN(output, y)


def weighted(output, y):
    return nn.functional.cross_entropy(output, y) * WEIGHT.sum()


def with_criterion(output, y, criterion):
    return criterion(output, y)


HOLDING = {
    "module": ({"loss": UNCERTAIN}, "loss", "'log_variance'"),
    "closure": ({"loss": closure()}, "loss", "'criterion.log_variance'"),
    "global": ({"loss": of_global}, "loss", "'UNCERTAIN.log_variance'"),
    "tensor": ({"loss": weighted}, "loss", "'WEIGHT'"),
    "partial": (
        {"loss": functools.partial(with_criterion, criterion=UNCERTAIN)},
        "loss",
        "'criterion.log_variance'",
    ),
    "method": ({"loss": UNCERTAIN.forward}, "loss", "a tensor"),
    "one of several": ({"loss": {"a": UNCERTAIN}}, "loss", "'0.log_variance'"),
    "step": (
        {"step": lambda model, batch: UNCERTAIN(model(batch[0]), batch[1])},
        "step",
        "'UNCERTAIN.log_variance'",
    ),
}


class WithCriterion(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.criterion = Uncertain()


class Named(nn.Linear):
    def forward(self, x):
        return {"a": super().forward(x)}


class TestLossesWithTrainableTensors:
    @pytest.mark.parametrize(
        ("objective", "argument", "name"), HOLDING.values(), ids=HOLDING
    )
    def test_they_are_refused_by_name(self, objective, argument, name):
        several = isinstance(objective.get("loss"), dict)
        model, y = (Named(4, 2), {"a": Y}) if several else (nn.Linear(4, 2), Y)
        failing = Trainer(model, optimizer=sgd, client=False, **objective)

        with pytest.raises(daskdl.ModelError) as caught:
            failing.fit(X, y)

        message = str(caught.value)
        assert message.startswith(f"{argument} has trainable tensors that are not")
        assert f"would not train them: {name} of shape (1,); make the" in message

    def test_the_remedy_of_the_message_trains_them(self):
        with pytest.raises(daskdl.ModelError) as caught:
            fit(loss=UNCERTAIN)
        step = eval(re.search(r"step=(lambda .*); or", str(caught.value))[1])
        fitted = Trainer(WithCriterion(4, 2), optimizer=sgd, step=step, client=False)

        fitted.fit(X, Y, validation=(X, Y))

        assert fitted.model_.criterion.log_variance.item() != 0
        assert fitted.predict(X).shape == (40, 2)

    @pytest.mark.parametrize("kind", ["loss", "step"])
    def test_frozen_ones_are_accepted(self, kind):
        loss = Uncertain().requires_grad_(False)
        kinds = {"loss": loss, "step": lambda net, batch: loss(net(batch[0]), batch[1])}
        fitted = Trainer(
            nn.Linear(4, 2), optimizer=sgd, client=False, **{kind: kinds[kind]}
        )

        fitted.fit(X, Y)

        assert fitted.history_[0]["examples"] == 40

    def test_a_teacher_without_gradients_is_accepted(self):
        teacher = nn.Linear(4, 2)

        def step(model, batch):
            with torch.no_grad():
                aim = teacher(batch[0]).softmax(1)
            return nn.functional.cross_entropy(model(batch[0]), aim)

        Trainer(nn.Linear(4, 2), optimizer=sgd, step=step, client=False).fit(X, Y)

    def test_a_tensor_that_the_loss_makes_in_each_call_is_accepted(self):
        def penalized(output, y):
            with torch.enable_grad():
                scale = torch.ones(1, requires_grad=True)
                loss = nn.functional.cross_entropy(output * scale, y)
                (slope,) = torch.autograd.grad(loss, [scale], create_graph=True)
            return loss + slope.square().sum()

        Trainer(nn.Linear(4, 2), penalized, sgd, client=False).fit(X, Y)


def test_one_callback_needs_no_list(tmp_path):
    fitted = trainer(callbacks=daskdl.Checkpoint(tmp_path))
    fitted.fit(X, Y, resume=True)
    fitted.save(tmp_path / "saved")
    again = Trainer.load(tmp_path / "saved", model=nn.Linear(4, 2), client=False)

    again.fit(X, Y, epochs=2, resume=True)

    assert [row["epoch"] for row in again.history_] == [0, 1]


def test_results_before_a_fit_name_the_fit():
    unfitted = trainer()

    for name in ("model_", "optimizer_", "scheduler_", "history_"):
        assert not hasattr(unfitted, name)
        with pytest.raises(AttributeError, match=f"no {name} yet; call fit first"):
            getattr(unfitted, name)
    with pytest.raises(
        AttributeError, match=r"'Trainer' object has no attribute 'net_"
    ):
        unfitted.net_  # noqa: B018


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: fit(X, Y, X, Y),
            "Trainer.fit() takes only X, y by position, got 4 arguments; pass the "
            "others by keyword: epochs= batch_size= validation= ",
        ),
        (
            lambda: Trainer(nn.Linear(4, 2), nn.MSELoss(), "sgd", 0.1),
            "Trainer() takes only model, loss, optimizer by position, got 4 arguments; "
            "pass the others by keyword: lr= ",
        ),
        *[
            (
                lambda keyword=keyword: fit(**{keyword: 3}),
                f"{keyword!r}; write {instead}",
            )
            for keyword, instead in [
                ("validation_data", "fit(..., validation=(X_val, y_val)) instead"),
                ("eval_set", "fit(..., validation=(X_val, y_val)) instead"),
                ("max_epochs", "fit(..., epochs=3) instead"),
                ("verbose", "Trainer(..., progress=True) instead"),
                ("callbacks", "Trainer(..., callbacks=[callback]) instead"),
                ("loader", "fit(daskdl.data.files(url, loader=loader, storage_options"),
                ("storage_options", "fit(daskdl.data.files(url, loader=loader, stor"),
                ("collate_fn", "fit(daskdl.data.dataset(dataset, collate_fn=collate_"),
                ("learning_rate", "Trainer(..., lr=0.1) instead"),
            ]
        ],
        *[
            (
                lambda keyword=keyword: trainer(**{keyword: 3}),
                f"Trainer() has no argument {keyword!r}; write {instead}",
            )
            for keyword, instead in [
                ("learning_rate", "Trainer(..., lr=0.1) instead"),
                ("criterion", "Trainer(..., loss=loss) instead"),
                ("precision", "Trainer(..., autocast=torch.bfloat16) instead"),
                ("epochs", "fit(..., epochs=3) instead"),
                ("batch_size", "fit(..., batch_size=32) instead"),
            ]
        ],
        (
            lambda: trainer().predict(X, verbose=0),
            "Trainer.predict() has no argument 'verbose'; write Trainer(..., progress=",
        ),
        (
            lambda: trainer().score_examples("x.csv", loader=3),
            "Trainer.score_examples() has no argument 'loader'; write fit(daskdl.data.",
        ),
        (
            lambda: trainer().evaluate(X, Y, verbose=0),
            "Trainer.evaluate() has no argument 'verbose'; write Trainer(..., progress",
        ),
        (
            lambda: daskdl.predict(nn.Linear(4, 2), X, num_workers=2),
            "predict() has no argument 'num_workers'; write Trainer(..., client=client",
        ),
        # No library has it.
        (lambda: trainer(colour=3), "got an unexpected keyword argument 'colour'"),
        (lambda: fit(colour=3), "got an unexpected keyword argument 'colour'"),
    ],
)
def test_a_keyword_of_another_library_is_answered(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


def test_each_answer_names_an_argument_that_exists():
    """So an answer stays true when an argument is renamed."""
    places = {"fit": Trainer.fit, "Trainer": Trainer}
    for keyword in ("eval_set", "max_epochs", "batch_size", "ckpt_path", "criterion"):
        with pytest.raises(TypeError) as caught:
            trainer(**{keyword: 3})
        name, argument = re.search(
            r"write (\w+)\(\.\.\., (\w+)=", str(caught.value)
        ).groups()
        assert argument in inspect.signature(places[name]).parameters
