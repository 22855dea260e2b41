"""A machine of stand-ins: a PATH with the system's small tools, without Python, MPI and conda."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOOLS = """
    awk basename bash cat chmod cp cut date dirname env find flock grep head ls mkdir mktemp mv rm
    sed sha256sum sleep sort tail tee touch tr uname xargs
"""


@dataclass
class Machine:
    """A folder with a PATH of its own; ``calls`` tells what its stand-ins were asked."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def log(self) -> Path:
        return self.root / "calls"

    def install(self, name: str, script: str) -> Path:
        """Put a stand-in on PATH: a bash script that first notes its name and arguments."""
        path = self.bin / name
        # written at once: both ends of a pipe may be stand-ins
        note = f"printf -v call ' [%s]' \"$@\"; printf '%s\\n' \"{name}$call\" >>'{self.log}'"
        path.write_text(f"#!{self.bin}/bash\n{note}\n{script}\n")
        path.chmod(0o755)
        return path

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def command(self, path: Path | str, *arguments: str) -> list[str]:
        return [str(self.bin / "bash"), str(path), *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.root), **self.environ, **more}

    def run(
        self, path: Path | str, *arguments: str, cwd: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(path, *arguments),
            env=self.environment(**more),
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    result = Machine(tmp_path)
    result.bin.mkdir()
    for tool in TOOLS.split():
        found = shutil.which(tool)
        assert found, f"these tests need the system's {tool}"
        (result.bin / tool).symlink_to(found)
    return result


@pytest.fixture
def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()
