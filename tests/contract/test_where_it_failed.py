"""Notes on errors of the user's loading code; collate functions and transforms."""

import dask
import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Trainer
from daskdl.data import dataset
from daskdl.errors import ModelError


def trainer(**options):
    return Trainer(
        lambda: nn.Linear(2, 2),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        client=False,
        **options,
    )


def fitted():
    fitted = trainer()
    fitted.fit(np.zeros((4, 2), np.float32), np.zeros(4, np.int64))
    return fitted


class Torn(torch.utils.data.Dataset):
    """A dataset with one bad item, not among the first."""

    def __len__(self):
        return 200

    def __getitem__(self, i):
        if i == 150:
            raise ValueError("torn")
        return np.zeros(2, np.float32), 0


def torn():
    raise ValueError("torn")


@pytest.mark.parametrize(
    ("do", "where"),
    [
        (lambda fitted: fitted.evaluate(Torn()), "item 150 of the dataset"),
        (lambda fitted: fitted.predict(Torn()), "items 128 to 191 of the dataset"),
        (lambda fitted: fitted.evaluate([dask.delayed(torn)()]), "part 0"),
        (lambda fitted: fitted.fit([dask.delayed(torn)()]), "part 0"),
    ],
    ids=["evaluate", "predict", "looking before evaluating", "looking before a fit"],
)
def test_an_error_has_a_note_with_its_part(do, where):
    trained = fitted()

    with pytest.raises(ValueError, match="torn") as caught:
        do(trained)

    assert f"in {where}" in caught.value.__notes__


def test_collate_fn_gets_the_items_of_one_batch():
    sizes = set()

    def collate(items):
        sizes.add(len(items))
        return np.stack([x for x, _ in items]), np.array([y for _, y in items])

    data = torch.utils.data.TensorDataset(
        torch.zeros(40, 2), torch.zeros(40, dtype=torch.int64)
    )

    trainer(accumulate=2).fit(dataset(data, collate_fn=collate), batch_size=4)

    assert sizes == {2, 4}  # two to rehearse with


def test_a_transform_must_keep_the_rows_that_are_predicted():
    def first_of(batch):
        return batch[0][:2], batch[1]

    with pytest.raises(ModelError, match=r"the shape \(2, 2\) for 4 rows"):
        fitted().predict(np.zeros((4, 2), np.float32), transform=first_of)
