"""Cluster environment of Lightning that tells the ranks of the library's own world."""

from __future__ import annotations

import os

from asyncddp.context import current


class WorldEnvironment:
    """Answers of a ``ClusterEnvironment``, taken from the running world whoever started it."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: a launcher has started the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Address at which process groups of torch meet."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port at which process groups of torch meet."""
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Return False: only the strategy chooses it."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return current().size

    def global_rank(self) -> int:
        """Return this rank."""
        return current().rank

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return current().local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's machine."""
        return current().machine_rank

    def set_world_size(self, size: int) -> None:
        """Ignore what the Trainer has computed of ``devices``."""

    def set_global_rank(self, rank: int) -> None:
        """Ignore what the Trainer has computed of ``devices``."""

    def teardown(self) -> None:
        """Leave the world as it is: it ends with the script."""
