"""Entry point of ``python -m asyncddp.cli``, the same command-line program as ``asyncddp``."""

from __future__ import annotations

from asyncddp.cli.main import main

if __name__ == "__main__":
    main(prog_name="asyncddp")
