"""Command-line interface: the ``asyncddp`` command group, and one module per subcommand.

Here belong options, help and what is printed; the work itself is done by the rooms below. Only the
entry point calls it. It never loads MPI or torch before a subcommand needs them, so that help and
errors come at once.
"""
