"""What a plan looks like: a table, and a sentence."""

import dataclasses
import html
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from daskdl.planning.costs import Measured
from daskdl.planning.network import Network
from daskdl.planning.prediction import Prediction

SHOWN = 16  # rows; of more, those whose number is a power of two, and the last
HEADINGS = ("workers", "efficiency", "samples/s", "step ms", "limit", "carried")


@dataclass(frozen=True)
class Plan:
    """What workers would be worth, made by :func:`daskdl.plan`.

    Printing it shows a table and the advice; of many rows some.

    Attributes:
        rows: A prediction for each number of workers, with the fields `workers`,
            `efficiency`, `samples_per_s`, `step_s`, `limit`, `carried`, and the parts
            of a step, `compute_s`, `encode_s`, `apply_s`, `messages_s` and `wait_s`.
        advice: Up to how many workers it pays, and what would help.
        measured: The costs it was made from; `measured.alone` are those of one worker.
        link: Between the workers' machines; None: all were on this one.

    Example:
        >>> import torch, daskdl
        >>> batch = torch.randn(32, 8), torch.randint(0, 3, (32,))
        >>> network = daskdl.Network(bandwidth_bits_per_s=1e9, latency_s=1e-3)
        >>> plan = daskdl.plan(torch.nn.Linear(8, 3), batch, workers=2, link=network)
        >>> [row.workers for row in plan.rows], plan.rows[0].efficiency
        ([1, 2], 1.0)
    """

    rows: tuple[Prediction, ...]
    advice: str
    measured: Measured
    link: Network | None

    def to_pandas(self) -> Any:
        """All rows as a `pandas.DataFrame`, indexed by workers; needs pandas."""
        import pandas as pd

        rows = [dataclasses.asdict(row) for row in self.rows]
        return pd.DataFrame(rows).set_index("workers")

    def _heading(self) -> str:
        costs = self.measured.alone
        where = "processes of this machine" if self.link is None else str(self.link)
        threads = "1 thread" if costs.threads == 1 else f"{costs.threads} threads"
        return (
            f"{costs.parameters:,} parameters, {costs.rows:,} rows a step, {threads}; "
            f"{costs.update_bytes / 1e3:,.1f} KB an update; {where}"
        )

    def _shown(self) -> list[Prediction]:
        if len(self.rows) <= SHOWN:
            return list(self.rows)
        last = self.rows[-1]
        powers = [row for row in self.rows if not row.workers & (row.workers - 1)]
        return powers if last in powers else [*powers, last]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{row.workers}",
                f"{row.efficiency:.2f}",
                f"{row.samples_per_s:,.0f}",
                f"{1e3 * row.step_s:,.1f}",
                row.limit,
                f"{row.carried:.0%}",
            )
            for row in self._shown()
        ]

    @override
    def __str__(self) -> str:
        table = [HEADINGS, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))
            for cells in table
        ]
        return "\n".join([self._heading(), *lines, self.advice])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
        body = "".join(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
            for cells in self._cells()
        )
        return (
            f"<p>{html.escape(self._heading())}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{html.escape(self.advice)}</p>"
        )
