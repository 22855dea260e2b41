"""The name `topology` for `asyncddp.topology`: the same modules, each class there once."""

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
    """Finds ``topology.x`` as ``asyncddp.topology.x``, unless ``topology`` is a user's own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Name the module of the full name, for a module of the short one."""
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
        """Give the module its own specification back; it has run already."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make ``topology`` and its modules further names of ``asyncddp.topology`` and its modules."""
    sys.modules[_SHORT] = sys.modules[_FULL]
    sys.meta_path.insert(0, _ShortName())
