"""``python -m asyncddp.launch`` is the command ``asyncddp``."""

from __future__ import annotations

from asyncddp.launch.cli import main

if __name__ == "__main__":
    main(prog_name="asyncddp")
