"""``python -m asyncddp.integrations.bagua.launch``: Bagua's launcher for the ranks of a node."""

from __future__ import annotations

from typing import Any

import click

from asyncddp.cli.options import IntegerParamType
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.launch_options import (
    CONTEXT,
    LauncherCommand,
    common_options,
    launch,
)

_NAME = "asyncddp.integrations.bagua.launch"


@click.command("launch", cls=LauncherCommand, context_settings=CONTEXT)
@click.option("--nnodes", type=IntegerParamType("number of nodes"), default=1, help="1.")
@click.option("--node_rank", type=IntegerParamType("node", least=0), default=0, help="0.")
@click.option("--master_addr", metavar="HOST", help="MASTER_ADDR for the ranks [this machine].")
@common_options
def main(nnodes: int, node_rank: int, master_addr: str | None, **given: Any) -> None:
    """Start PROGRAM on this machine, as asyncddp run -np NPROC_PER_NODE PROGRAM does.

    For several nodes see baguarun --help.
    """
    if nnodes > 1 or node_rank > 0:
        each = given["nproc_per_node"]
        raise ArgumentError(
            f"--nnodes, --node_rank: expected one node, got nnodes={nnodes}, node_rank={node_rank}."
            " Bagua starts a launcher on every node; here one command starts the ranks of all "
            "nodes. Call, on one of them, baguarun --host_list HOST1,HOST2 "
            f"--nproc_per_node={each} PROGRAM, or asyncddp run -H HOST1:{each},HOST2:{each} "
            "PROGRAM; in an allocation of Slurm asyncddp run finds the nodes by itself."
        )
    exports = () if master_addr is None else (f"MASTER_ADDR={master_addr}",)
    launch(_NAME, 1, given, exports=exports)


if __name__ == "__main__":
    main(prog_name=f"python -m {_NAME}")
