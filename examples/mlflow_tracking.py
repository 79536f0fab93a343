"""How do I track fits with MLflow?

A callback on the client reports each epoch, here in a local store. Needs mlflow.

Run:  python examples/mlflow_tracking.py [store]
"""

import math
import sys

import mlflow
import torch

import daskdl


# --8<-- [start:callback]
class MLflow(daskdl.Callback):
    """Runs on the client: one MLflow run for each fit."""

    def on_fit_begin(self, fit):
        mlflow.start_run(run_name=fit.name)
        mlflow.log_params(fit._asdict())

    def on_epoch_end(self, row):
        numbers = {n: v for n, v in row.items() if isinstance(v, int | float)}
        known = {n: v for n, v in numbers.items() if not math.isnan(v)}
        mlflow.log_metrics(known, step=row["epoch"])

    def on_fit_end(self, end):
        mlflow.log_dict(dict(end.history.run.options), "options.json")
        mlflow.end_run("FINISHED" if end.error is None else "FAILED")


# --8<-- [end:callback]
def main(store: str) -> None:
    mlflow.set_tracking_uri(store)
    X = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    y = (X.sum(dim=1) > 0).long()
    trainer = daskdl.Trainer(
        torch.nn.Linear(8, 2),
        torch.nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        client=False,
        callbacks=[MLflow()],
        progress=False,
    )
    trainer.fit(X, y, epochs=3, validation=(X, y))
    (run,) = mlflow.search_runs(output_format="list")
    print(f"{run.info.status}, val_loss {run.data.metrics['val_loss']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///mlflow.db")
