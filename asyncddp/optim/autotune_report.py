"""Report of a search for the fastest settings: one line, or a table of all that was tried."""

from __future__ import annotations

import io
from statistics import fmean
from typing import TYPE_CHECKING

from asyncddp.optim.autotune_candidates import Setting
from asyncddp.optim.autotune_result import TriedSetting

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 120


def brief(setting: Setting) -> str:
    """Write a setting in one line.

    Example:
        >>> brief({"bucket_size_in_mb": 0.5, "communication": None, "update_in_backward": False})
        'bucket_size_in_mb=0.5'
    """
    parts = [f"{name}={value}" for name, value in setting.items() if value not in (None, False)]
    return ", ".join(parts)


def text_of(tried: list[TriedSetting], chosen: int | None, title: str) -> str:
    """Write a table of what was tried, the chosen one first, then those that were kept longest."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=_WIDTH, highlight=False).print(_table(tried, chosen))
    return f"{title}\n{text.getvalue()}"


def _table(tried: list[TriedSetting], chosen: int | None) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = [
        name
        for name in tried[0].setting
        if len({repr(one.setting[name]) for one in tried}) > 1 or name == "bucket_size_in_mb"
    ]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in (*shown, "ms a step", "of the chosen", "trials", ""):
        table.add_column(header, justify="right", no_wrap=True)
    ratios = [None if chosen is None else _ratio(one, tried[chosen]) for one in tried]
    order = sorted(range(len(tried)), key=lambda k: (k != chosen, -len(tried[k].seconds), k))
    for index in order:
        one, ratio = tried[index], ratios[index]
        table.add_row(
            *(_cell(one.setting[name]) for name in shown),
            f"{1e3 * fmean(one.seconds):.3g}" if one.seconds else "-",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{len(one.seconds) / 2:g}",
            "chosen" if index == chosen else "",
        )
    return table


def _ratio(one: TriedSetting, chosen: TriedSetting) -> float | None:
    """Compare what was measured of two settings in the same sweeps."""
    return fmean(own) / fmean(chosen.seconds[: len(own)]) if (own := one.seconds) else None


def _cell(value: float | bool | str | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
