"""Command-line interface: the ``asyncddp`` command group, and one module for each subcommand."""
