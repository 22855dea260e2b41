"""Every verb between two ranks that are threads, once; what compute-sanitizer is to watch.

python -m tests.gpu.short_run
"""

from __future__ import annotations

import asyncddp as bf
from tests.gpu import cases
from tests.gpu.agreed import on_transport
from tests.gpu.places import GPU


def main(place=None):
    place = place or GPU()
    with bf.local_world(2, ranks_per_machine=2, timeout=300.0) as world:
        world.run(lambda: on_transport(place, "cuda_staged", cases.races, place, 1, False))


if __name__ == "__main__":
    main()
