"""Options and clients that cannot be used are refused by name."""

import asyncio

import dask.array as da
import dask.config
import pytest
import torch
from distributed import Client
from torch.optim import lr_scheduler

from daskdl import Callback, GradientSharing, OptionError
from daskdl.data import Csv
from tests.support.problems import mlp, rows, trainer

X, Y = rows(64)
BLOCKS = da.from_array(X, chunks=(16, 20))

FIT_OPTIONS = {
    "no epoch": ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
    "half epochs": ({"epochs": 1.5}, "epochs must be a whole number >= 1, got 1.5"),
    "true epochs": ({"epochs": True}, "epochs must be a whole number >= 1, got True"),
    "no row": ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
    "shuffle": ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
    "bad": ({"on_bad_batch": "no"}, "on_bad_batch must be 'raise' or 'skip', got 'no'"),
    "approach": ({"approach": "x"}, "approach must be 'direct' or 'export', got 'x'"),
    "ahead": ({"prefetch": -1}, "prefetch must be a whole number >= 0, got -1"),
    "transform": ({"transform": 3}, "transform must be a function or None, got 3"),
    "loader": ({"loader": "csv"}, r"loader must be a function .*, got 'csv'"),
    "class": ({"loader": Csv}, r"loader must be an object, .*; write Csv\(...\)"),
    "files": ({"loader": print}, "loader is for paths and URLs, got other data"),
    "collate": ({"collate_fn": print}, "collate_fn is for a torch Dataset, got other"),
    "validation": (
        {"validation": X},
        r"validation: y must be given, or data of pairs \(x, y\)",
    ),
}


@pytest.mark.parametrize(("options", "message"), FIT_OPTIONS.values(), ids=FIT_OPTIONS)
def test_options_of_a_fit(untouched, options, message):
    with pytest.raises(OptionError, match=message):
        trainer(untouched).fit(X, Y, **options)


TRAINER_OPTIONS = {
    "master": ({"master": "mean"}, "master must be a daskdl.TrainingMaster, got 'mean"),
    "class": ({"master": GradientSharing}, "master must be a daskdl.TrainingMaster"),
    "seed -1": ({"seed": -1}, r"seed must be a whole number in \[0, 2\*\*63\), got -1"),
    "large": (
        {"seed": 2**63},
        "seed must be a whole number in .* got 9223372036854775",
    ),
    "seed text": ({"seed": "0"}, "seed must be a whole number in .* got '0'"),
    "seed true": ({"seed": True}, "seed must be a whole number in .* got True"),
    "device": ({"device": "quantum"}, "device must be 'auto' or .* got 'quantum'"),
    "number": ({"device": 0}, "device must be 'auto' or a torch device, got 0"),
    "progress": ({"progress": "yes"}, "progress must be True, False or None, got 'yes"),
    "one": ({"callbacks": Callback()}, "callbacks must be a list of daskdl.Callback"),
    "print": ({"callbacks": [print]}, "callbacks must be daskdl.Callback, got <built"),
    "double": ({"autocast": torch.float64}, "autocast must be .* got torch.float64"),
    "no batch": ({"accumulate": 0}, "accumulate must be a whole number >= 1, got 0"),
    "norm 0": ({"clip_grad_norm": 0}, "clip_grad_norm must be a number > 0 or None"),
    "no loss": ({"loss": None}, "exactly one of loss and step must be given, got nei"),
    "two": ({"step": print}, "exactly one of loss and step must be given, got loss="),
    "no step": ({"loss": None, "step": 3}, r"step must be a function of \(model, "),
    "scheduler": ({"scheduler": 3}, "scheduler must be a function .*; got 3"),
    "every": ({"scheduler_every": "day"}, "scheduler_every must be 'epoch' or 'step'"),
    "no scheduler": ({"scheduler_every": "step"}, "'step' needs a scheduler, got None"),
}


@pytest.mark.parametrize(
    ("options", "message"), TRAINER_OPTIONS.values(), ids=TRAINER_OPTIONS
)
def test_options_of_a_trainer(untouched, options, message):
    with pytest.raises(OptionError, match=message):
        trainer(untouched, **options)


MISFITS = {
    "nothing": ({"scheduler": lambda optimizer: None}, "scheduler must return a torch"),
    "fails": ({"scheduler": lr_scheduler.StepLR}, "scheduler failed on a SGD: "),
    "plateau": (
        {"scheduler": lr_scheduler.ReduceLROnPlateau, "scheduler_every": "step"},
        "scheduler_every must be 'epoch' for ReduceLROnPlateau",
    ),
    "half": (
        {"model": lambda: mlp().half(), "autocast": torch.float16},
        "autocast=torch.float16 needs a model with float32 parameters",
    ),
}


@pytest.mark.parametrize(("options", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_go_with_the_model_or_the_optimizer(untouched, options, message):
    with pytest.raises(OptionError, match=message):
        trainer(untouched, **options).fit(X, Y)


def test_a_time_out_that_is_no_time(untouched):
    with (
        dask.config.set({"daskdl.timeouts.silence": "soon"}),
        pytest.raises(OptionError, match=r"daskdl\.timeouts\.silence must .* 'soon'"),
    ):
        trainer(untouched).fit(X, Y)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_what_is_not_trained_yet_cannot_be_used(untouched, method):
    arguments = (X, Y) if method == "evaluate" else (X,)

    with pytest.raises(OptionError, match="has no model_ yet; call fit first"):
        getattr(trainer(untouched), method)(*arguments)


class TestClient:
    def test_text_is_refused(self):
        with pytest.raises(OptionError, match="client must be a distributed"):
            trainer("tcp://127.0.0.1:8786").fit(X, Y)

    def test_a_closed_one_is_refused(self, idle):
        with Client(idle.cluster, set_as_default=False) as closed:
            pass

        with pytest.raises(OptionError, match=r"and running, .* 'closed'"):
            trainer(closed).fit(X, Y)

    def test_an_asynchronous_one_is_refused(self, untouched):
        async def fit():
            async with Client(
                untouched.cluster.scheduler_address,
                asynchronous=True,
                set_as_default=False,
            ) as client:
                trainer(client).fit(X, Y)

        with pytest.raises(OptionError, match="asynchronous=True; use Client"):
            asyncio.run(fit())

    def test_a_cluster_without_workers_is_refused(self, no_workers):
        with pytest.raises(OptionError, match="has no workers; wait for some with"):
            trainer(no_workers).fit(X, Y)

    def test_a_lazy_prediction_needs_a_cluster_that_stays(self, monkeypatch):
        def none():
            raise ValueError

        monkeypatch.setattr("daskdl.util.default_client", none)
        own = trainer(None)
        own.model_ = mlp()

        with pytest.raises(OptionError, match="client must be given to predict on a"):
            own.predict(BLOCKS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the workers have the device")
def test_a_device_that_a_worker_has_not(client):
    message = r"^replica \d on \w+://.*: device='cuda' is not there: torch finds 0 CUDA"

    with pytest.raises(OptionError, match=f"{message}.*take device='auto'"):
        trainer(client, device="cuda").fit(X, Y)
