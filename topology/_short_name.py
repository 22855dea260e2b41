"""Alias `topology` of `asyncddp.topology`: imports the same module objects under the short name."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # it loads much at run time

_FULL = __package__
_SHORT = _FULL.rpartition(".")[2]


class _ShortName:
    """Import finder: maps ``topology.x`` to ``asyncddp.topology.x``, but not in a user's own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module under its short name; None for other modules."""
        if (
            not fullname.startswith(f"{_SHORT}.")
            or sys.modules.get(_SHORT) is not sys.modules[_FULL]
        ):
            return None
        return ModuleSpec(fullname, cast("Loader", self))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its full name."""
        module = importlib.import_module(f"{_FULL}{spec.name.removeprefix(_SHORT)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification of the module, which has been executed already."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Install ``topology`` as an alias of ``asyncddp.topology``, with all its modules."""
    sys.modules[_SHORT] = sys.modules[_FULL]
    sys.meta_path.insert(0, _ShortName())
