"""Entry point of ``python -m asyncddp``, the same command-line program as ``asyncddp``."""

from asyncddp.cli.main import main

if __name__ == "__main__":
    main(prog_name="asyncddp")
