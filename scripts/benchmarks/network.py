"""``network``: a training step on 2, 4 and 8 hosts, over links that are slower than computing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.contract import Row
from benchmarks.network_hosts import command as on_hosts
from benchmarks.network_hosts import hosts, refusal
from benchmarks.network_model import Workload
from benchmarks.network_plot import draw
from benchmarks.network_tables import (
    BYTES_COLUMNS,
    STEP_COLUMNS,
    Link,
    Measured,
    byte_lines,
    step_lines,
)
from benchmarks.own_report import Figures, Options, command, finished
from benchmarks.own_runs import RunFailed, run

__all__ = ["main", "measure"]

_HOSTS = (2, 4, 8)
_LINKS = (
    Link("100 Mbit/s", "100mbit", 1e8, Workload(16, 256, 0.200, 8)),
    Link("1 Gbit/s", "1gbit", 1e9, Workload(16, 512, 0.070, 8)),
    Link("unlimited", "unlimited", None, Workload(16, 512, 0.020, 8)),
)
_QUICK = Link("1 Gbit/s", "1gbit", 1e9, Workload(16, 256, 0.020, 8))
_ROUNDS, _QUICK_ROUNDS = 30, 3
_STEPS = 4  # over which bytes are counted
_STEP_NOTE = (
    "Hosts are network namespaces of this machine and share its cores. So the model computes "
    "little (16 square linear layers, batch of 4) and waits for the rest, evenly over the "
    "layers, a third in forward: as an accelerator computes while the processor is free. "
    "Compute is the local step, of all hosts at once. DDP and ours cut the model into the same "
    "8 buckets. Communication alone: a blocking call on a tensor of the model's size. Overlap: "
    "1 - (step - compute) / communication alone."
)
_BYTES_NOTE = (
    "Of the host that sends most, per step. Own count: bytes_sent of the optimizer. Interface: "
    "tx_bytes of e0, with acknowledgements and nothing subtracted; a packet of up to 48 KB counts "
    "with one header, as it comes from the system to a card that cuts it up. With all headers: "
    "counted by the limiter of the rate, with 66 bytes on each 1448, as they go over a wire."
)


def measure(count: int, link: Link, rounds: int, advance: Callable[[str], None]) -> Measured:
    """Make hosts, run all methods on them, and take them down."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, hosts(count, link.rate):
        out = Path(folder) / "found.json"
        given = {**asdict(link.workload), "rounds": rounds, "steps": _STEPS, "out": out}
        words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        run(
            on_hosts(count, "network_ranks", *words),
            advance=lambda text: advance(f"{count} hosts, {link.name}, {text}"),
        )
        read = json.loads(out.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "seconds": tuple(row["seconds"])}) for row in read["rows"]]
    return Measured(count, link, rows, read["sent"], read["missing"], read["header"])


def figures(options: Options, advance: Callable[[str], None]) -> Figures:
    """Everything that this bench shows.

    Raises:
        RunFailed: Hosts cannot be made here, or a run on them failed.
    """
    problem = refusal()
    if problem is not None:
        raise RunFailed(f"network measures between hosts of its own, and {problem}")
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    links, counts = ((_QUICK,), (2,)) if options.quick else (_LINKS, _HOSTS)
    found = [measure(count, link, rounds, advance) for link in links for count in counts]
    sheets = [
        finished(
            f"network_step_{one.hosts}_{one.link.rate}",
            f"a step, {one.place}",
            STEP_COLUMNS,
            list(step_lines(one)),
            f"{one.note} {_STEP_NOTE if one is found[0] else ''}",
        )
        for one in found
    ]
    lines = [line for one in found for line in byte_lines(one)]
    title = "bytes on the wire, per step and host"
    sheets.append(finished("network_bytes", title, BYTES_COLUMNS, lines, _BYTES_NOTE))
    rows = [
        replace(row, table=f"{row.table}_{one.hosts}_{one.link.rate}")
        for one in found
        for row in one.rows
    ]
    missing = [
        f"{method}, {one.place}, was not measured: {why}"
        for one in found
        for method, why in one.missing.items()
    ]
    facts = {**found[0].facts, "rounds": rounds}
    return Figures(facts, sheets, lambda path: draw(path, found), rows, missing)


main = command("network", figures)

if __name__ == "__main__":
    main()
