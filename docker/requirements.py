"""Prints what asyncddp and some extras need, so that an image holds it in a layer of its own.

Torch is left out: the images install it first, in the build that they want.
"""

import re
import sys
from pathlib import Path
from typing import Any

import tomllib


def requirements(declared: dict[str, Any], extras: list[str]) -> list[str]:
    """What ``pyproject.toml`` declares for running and building, without torch."""
    project = declared["project"]
    wanted = [*declared["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [line for line in wanted if not re.match(r"torch\b", line)]


if __name__ == "__main__":
    given = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    sys.stdout.write("\n".join(requirements(given, sys.argv[1:])) + "\n")
