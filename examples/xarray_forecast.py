"""How do I train on maps in a zarr file that I open with xarray?

This example learns to forecast tomorrow's map from today's. The maps are opened
lazily: each worker reads the chunks that it trains on. The forecasts are a lazy
DataArray with the coordinates of the maps. Here the maps are moving waves; yours would
be fields of a reanalysis or of a satellite.

Run:  python examples/xarray_forecast.py
"""

import tempfile

import numpy as np
import pandas as pd
import xarray as xr
from dask.distributed import Client
from torch import nn

import daskdl

DAYS, LAT, LON = 1_000, 16, 32
CHUNK = 50  # days


def write_maps(url):
    """Write maps of waves that move east, one for each day."""
    time, lat, lon = np.arange(DAYS), np.arange(LAT), np.arange(LON)
    phases = np.random.default_rng(0).uniform(0, 2 * np.pi, size=(4, 1, 1, 1))
    waves = sum(
        np.sin(2 * np.pi * k * (lon - k * time[:, None, None]) / LON + phase)
        * np.cos(np.pi * k * lat[:, None] / LAT + phase)
        for k, phase in enumerate(phases, start=1)
    )
    maps = xr.DataArray(
        waves.astype("float32"),
        {"time": pd.date_range("2020-01-01", periods=DAYS), "lat": lat, "lon": lon},
        ["time", "lat", "lon"],
        name="temperature",
    )
    maps.chunk(time=CHUNK).to_zarr(url, consolidated=False)


def network():
    def layer(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 5, padding=2, padding_mode="circular")

    return nn.Sequential(
        nn.Unflatten(1, (1, LAT)),
        layer(1, 16),
        nn.ReLU(),
        layer(16, 16),
        nn.ReLU(),
        layer(16, 1),
        nn.Flatten(1, 2),
    )


def error(forecasts, truth):
    """Return the root mean square error."""
    return float(np.sqrt(((forecasts - truth) ** 2).mean()))


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client,
    ):
        write_maps(f"{folder}/maps.zarr")
        maps = xr.open_zarr(f"{folder}/maps.zarr", consolidated=False).temperature
        # With the coordinates of today, so that rows are paired.
        tomorrow = maps.shift(time=-1).isel(time=slice(None, -1)).chunk(time=CHUNK)
        today = maps.isel(time=slice(None, -1))

        trainer = daskdl.Trainer(network, nn.MSELoss(), "adam", lr=3e-3, client=client)
        history = trainer.fit(today, tomorrow, epochs=6, validation=0.2)
        for row in history:
            print(f"epoch {row['epoch']}: loss {row['loss']:.3f}")

        forecasts = today.copy(data=trainer.predict(today))  # still lazy
        print(f"error of the forecasts {error(forecasts, tomorrow):.3f}")
        print(f"error if tomorrow is like today {error(today, tomorrow):.3f}")


if __name__ == "__main__":
    main()
