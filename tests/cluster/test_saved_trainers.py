"""Trainers of a cluster that are saved, to files and to S3, and loaded."""

import dask.array as da
import pytest
import torch
from torch import nn

from daskdl import SaveError, Trainer
from tests.support import s3
from tests.support.problems import kept, rows, trainer
from tests.support.recording import vector

pytestmark = pytest.mark.slow

X, Y = rows()


def model():
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))


def of_lambdas(client):
    return trainer(
        client,
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        master=kept(max_staleness=0),
    )


@pytest.mark.slow
def test_a_trainer_loaded_from_s3_goes_on_as_if_it_had_not_been_saved(
    client, bucket, s3_endpoint
):
    options = s3.options(s3_endpoint)
    without = of_lambdas(client)
    without.fit(X, Y, batch_size=16)
    for _ in range(2):  # the second over the first
        without.save(f"{bucket}/run-17", storage_options=options)

    loaded = Trainer.load(
        f"{bucket}/run-17", model=model, client=client, storage_options=options
    )

    ends = [one.fit(X, Y, batch_size=16)[-1]["loss"] for one in (without, loaded)]
    assert ends[0] == ends[1]
    assert torch.equal(vector(loaded.model_), vector(without.model_))


def test_what_is_not_on_s3_is_an_error_with_the_url(client, bucket, s3_endpoint):
    options = s3.options(s3_endpoint)

    with pytest.raises(SaveError, match=f"cannot read {bucket}/nothing"):
        Trainer.load(f"{bucket}/nothing", client=client, storage_options=options)


def test_a_loaded_trainer_predicts_lazily_and_scores_on_the_cluster(client, tmp_path):
    fitted = of_lambdas(client)
    fitted.fit(X, Y, batch_size=16)
    fitted.save(tmp_path)
    lazy = da.from_array(X, chunks=(120, 20))

    loaded = Trainer.load(tmp_path, model=model, client=client)

    predictions = client.compute(loaded.predict(lazy)).result()
    assert (predictions == fitted.predict(X)).all()
    assert loaded.evaluate(X, Y) == fitted.evaluate(X, Y)
