"""Rows are scaled like those that the model is trained on, or there is a warning."""

import numpy as np
import pandas as pd
import pytest
from dask import delayed
from torch import nn

import daskdl
from daskdl import Checkpoint, Trainer
from daskdl.data import MinMax, Standardize

ROWS = 32
FRAME = pd.DataFrame(
    {"age": np.arange(ROWS) * 10.0, "size": 7.0 + np.arange(ROWS)[::-1] % 5}
)
Y = (FRAME["age"].to_numpy() > 160).astype(np.int64)
SCALED = Standardize().fit(FRAME, client=False)
UNSCALED = pytest.warns(UserWarning, match="but these rows are not scaled by it: pass")


def trainer(**options):
    return Trainer(
        lambda: nn.Linear(2, 2),
        nn.CrossEntropyLoss(),
        "sgd",
        lr=0.1,
        client=False,
        progress=False,
        **options,
    )


def standard(X):
    return Standardize().fit(X, client=False)


def packed(folder, X=FRAME, scaled=True):
    transform = standard(X) if scaled else None
    url = str(folder / f"packed-{len([*folder.iterdir()])}")
    daskdl.data.pack(*(X, Y), url=url, per_file=8, transform=transform, client=False)
    return url


def on_packed(folder, X, **options):
    fitted = trainer(**options)
    fitted.fit(packed(folder, X))
    return fitted


def on_transform(folder, X, **options):
    fitted = trainer(**options)
    fitted.fit(X, Y, transform=standard(X))
    return fitted


def loaded(folder, X):
    on_packed(folder, X).save(folder / "save")
    return Trainer.load(folder / "save", model=lambda: nn.Linear(2, 2), client=False)


TRAINED = pytest.mark.parametrize("trained", [on_packed, on_transform, loaded])
KINDS = pytest.mark.parametrize("X", [FRAME, FRAME.to_numpy()], ids=["frame", "array"])


def served(fitted, X, **options):
    with fitted.predictor(**options) as predictor:
        return predictor(X)


METHODS = {
    "predict": lambda fitted, X, **how: fitted.predict(X, **how),
    "evaluate": lambda fitted, X, **how: fitted.evaluate(X, Y, **how),
    "score_examples": lambda fitted, X, **how: fitted.score_examples(X, Y, **how),
    "predictor": served,
    "fit": lambda fitted, X, **how: fitted.fit(X, Y, **how),
}
EACH_METHOD = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@TRAINED
@KINDS
@EACH_METHOD
def test_rows_that_are_not_scaled_are_warned_of_and_the_remedy_mends_it(
    trained, X, method, tmp_path
):
    fitted = trained(tmp_path, X)

    with UNSCALED:
        method(fitted, X)
    if method is not METHODS["fit"]:  # the next fit is what counts
        method(fitted, X, transform=standard(X))
        with pytest.warns(UserWarning, match="are scaled by another normalizer: pass"):
            method(fitted, X, transform=MinMax().fit(X, client=False))


@pytest.mark.filterwarnings("error")
@KINDS
def test_a_normalizer_of_the_trainer_scales_the_rows_of_all_methods(X, tmp_path):
    fitted = trainer(transform=standard(X))
    fitted.fit(X, Y, validation=(X, Y))

    for method in METHODS.values():
        method(fitted, X)
    url = packed(tmp_path, X, scaled=False)
    trainer(transform=standard(X)).fit(url, validation=(X, Y))


@pytest.mark.filterwarnings("error")
def test_rows_that_are_scaled_by_hand_are_not_known_as_such(tmp_path):
    X, fitted = FRAME.to_numpy(), trainer()
    fitted.fit(SCALED((X, None))[0], Y)

    fitted.predict(X, transform=standard(X))
    fitted.evaluate(packed(tmp_path, X))


@pytest.mark.filterwarnings("error")
def test_a_normalizer_of_the_same_rows_in_other_parts_is_the_same():
    frame = FRAME + np.random.default_rng(0).normal(size=FRAME.shape)
    parts = [delayed(frame[:13]), delayed(frame[13:])]
    together, apart = standard(frame), Standardize().fit(parts, client=False)
    assert together != apart  # in the last digits
    fitted = trainer()

    fitted.fit(frame, Y, transform=together)
    fitted.predict(frame, transform=apart)

    assert together.digest == apart.digest != standard(FRAME).digest


def test_validation_beside_packed_files_is_warned_of_and_packed_as_well(tmp_path):
    url = packed(tmp_path)

    with UNSCALED:
        trainer().fit(url, validation=(FRAME, Y))
    trainer().fit(url, validation=packed(tmp_path))


def test_rows_that_are_scaled_twice_are_warned_of(tmp_path):
    url = packed(tmp_path)

    for fit in (
        lambda: trainer(transform=SCALED).fit(url),
        lambda: trainer().fit(url, transform=SCALED),
        lambda: trainer(transform=SCALED).fit(FRAME, Y, transform=SCALED),
    ):
        with pytest.warns(UserWarning, match="are scaled twice by the same normali"):
            fit()


def test_a_pack_of_packed_files_keeps_their_scaling(tmp_path):
    fitted = trainer()
    again = str(tmp_path / "again")
    daskdl.data.pack(
        daskdl.data.files(packed(tmp_path)), url=again, per_file=4, client=False
    )
    fitted.fit(again)

    with UNSCALED:
        fitted.predict(FRAME)


def test_a_resumed_fit_compares_its_rows_with_those_of_its_checkpoint(tmp_path):
    url = tmp_path / "checkpoints"
    trainer(callbacks=[Checkpoint(url)]).fit(packed(tmp_path))

    with UNSCALED:
        trainer().fit(FRAME, Y, epochs=2, resume=url)
    trainer().fit(FRAME, Y, epochs=2, resume=url, transform=SCALED)


@pytest.mark.filterwarnings("error")
def test_counting_steps_and_other_transforms_are_not_warned_of(tmp_path):
    fitted = on_packed(tmp_path, FRAME)
    fitted.steps(FRAME)

    fitted = trainer()
    fitted.fit(FRAME, Y, transform=lambda batch: (batch[0] + 1, batch[1]))
    fitted.predict(FRAME)
