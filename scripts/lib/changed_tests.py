"""Prints the tests of what has changed since a commit, or of some files, one path a line.

Usage: python scripts/lib/changed_tests.py [BASE]
       python scripts/lib/changed_tests.py FILE…

A test is chosen where it changed itself, where it imports a changed module, directly or through
others, or where it uses a name that a package loads lazily from one. A registry may load a changed
module by its name: the tests that import the module's package itself are chosen, too. Of files
that are named only the nearest tests are: those that import one directly, where there are any.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

REPO = Path(__file__).resolve().parents[2]
FOLDERS = {
    ".ci": ("tests/scripts",),
    "README.md": ("tests/docs",),
    "docs": ("tests/docs",),
    "examples": ("tests/examples", "tests/notebook"),
    "pyproject.toml": ("tests",),
    "scripts": ("tests/scripts", "tests/examples"),
}
"""Tests of what is no module of the library or of the tests."""
FACES = {"asyncddp": "asyncddp/__init__.pyi", "asyncddp.topology": "topology/__init__.pyi"}
"""Stubs of the packages that load their names on first use."""


def git(*words: str) -> list[str]:
    """Return the lines that a command of git prints; none where it fails."""
    done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files(base: str) -> set[str]:
    """Return the files that differ from where this branch left ``base``, and those that are new."""
    start = git("merge-base", base, "HEAD") or ["HEAD"]
    return {
        *git("diff", "--name-only", "--no-renames", start[0]),
        *git("ls-files", "--others", "--exclude-standard"),
    }


def module_of(path: str) -> str:
    """Return the name under which a file is imported."""
    named = f"asyncddp/{path}" if path.startswith("topology/") else path
    return named.rsplit(".", 1)[0].replace("/", ".").removesuffix(".__init__")


def lazy_names(face: str) -> dict[str, str]:
    """Return the module that each name of a package comes from, by its stub."""
    tree = ast.parse((REPO / FACES[face]).read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [face, node.module]))
            found.update(
                {one.name: module if node.module else f"{face}.{one.name}" for one in node.names}
            )
    return found


def used_names(source: str) -> Iterator[tuple[str, str]]:
    """Yield each package of :data:`FACES` with a name that a module takes from it."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({one.asname or one.name: one.name for one in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module in FACES:
            aliases.update(
                {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            )
            yield from ((node.module, one.name) for one in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            face = aliases.get(node.value.id)
            if face in FACES:
                yield face, node.attr


# once a process: which module of the library and its tests imports which
import_graph = functools.cache(lambda: grimp.build_graph("asyncddp", "tests", cache_dir=None))


def nearest_tests(modules: set[str]) -> set[str]:
    """Return the modules of tests that import some of these directly, or else in any way."""
    graph = import_graph()
    direct = [graph.find_modules_that_directly_import(one) for one in modules & graph.modules]
    found = set[str]().union(*direct)
    return {test for test in found if ".test_" in test} or tests_of(modules)


def tests_of(modules: set[str]) -> set[str]:
    """Return the modules of tests that import some of these, or use what comes from them."""
    graph = import_graph()
    reached = set(modules)
    for module in modules & graph.modules:
        reached |= graph.find_downstream_modules(module)
    ours = [module for module in modules if module.startswith("asyncddp.")]
    packages = {module.rpartition(".")[0] for module in ours} - set(FACES)
    for package in packages & graph.modules:
        reached |= graph.find_modules_that_directly_import(package)
    names = {face: lazy_names(face) for face in FACES}
    for module in graph.modules - reached:
        path = REPO / f"{module.replace('.', '/')}.py"
        if module.startswith("tests.") and path.exists():
            used = used_names(path.read_text(encoding="utf-8"))
            if any(names[face].get(name) in reached for face, name in used):
                reached |= {module, *graph.find_downstream_modules(module)}
    return {module for module in reached if module.startswith("tests")}


def chosen_paths(files: set[str], *, nearest: bool = False) -> set[str]:
    """Return the files and folders of tests that a change of these files asks for."""
    find_tests = nearest_tests if nearest else tests_of
    chosen = {
        folder
        for head, folders in FOLDERS.items()
        for file in files
        if file == head or file.startswith(f"{head}/")
        for folder in folders
    }
    ours = {file for file in files if file.endswith((".py", ".pyi"))}
    ours = {file for file in ours if file.startswith(("asyncddp/", "tests/", "topology/"))}
    for module in find_tests({module_of(file) for file in ours}):
        path = Path(*module.split(".")).with_suffix(".py")
        if path.name == "conftest.py" and path.parent != Path("tests"):
            chosen.add(str(path.parent))
        elif path.name.startswith("test_") and (REPO / path).exists():
            chosen.add(str(path))
    if "tests/conftest.py" in files:
        chosen.add("tests")
    return {path for path in chosen if not any(str(up) in chosen for up in Path(path).parents)}


if __name__ == "__main__":
    given = sys.argv[1:] or ["main"]
    named = (REPO / given[0]).is_file()
    found = chosen_paths(set(given) if named else changed_files(given[0]), nearest=named)
    sys.stdout.writelines(f"{path}\n" for path in sorted(found))
