"""Imports inside the package only point down, and what the writer loads is free of torch and numpy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstay

PACKAGE = Path(backstay.__file__).parent
# Lower layers first. `save` and `load` share a layer and never see each other.
LAYERS = [
    {"errors", "events", "gc_pause", "points"},
    {"manifest"},
    {"policies"},
    {"attempts", "storage", "coordination", "codec", "naming", "frames", "frame_head"},
    {"catalog", "state", "rng", "fingerprint"},
    {"save", "load"},
    {"checkpointer", "poll"},
    {"interop", "testing", "training"},
    {"recipes", "integrations"},
    {"cli"},
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
# Modules that are not written yet are passed over; a whole list is what the writer may load.
TORCH_FREE = [
    "backstay",
    "backstay.attempts",
    "backstay.catalog",
    "backstay.errors",
    "backstay.events",
    "backstay.manifest",
    "backstay.points",
    "backstay.policies",
    "backstay.save",
    "backstay.save.commit",
    "backstay.save.messages",
    "backstay.save.retention",
    "backstay.save.writer_main",
    "backstay.save.writer_process",
    "backstay.storage",
    "backstay.storage.base",
    "backstay.storage.image_write",
    "backstay.storage.local",
    "backstay.testing",
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_written(module: str) -> bool:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def imported_units(path: Path) -> set[str]:
    """Units of this package that a file imports, wherever in the file; for type checkers only does not count."""
    names: set[str] = set()
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}:{node.lineno}: write imports out from `backstay.` on")
        elif isinstance(node, ast.ImportFrom) and node.module == "backstay":
            names |= {f"backstay.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    units = {name.split(".")[1] for name in names if name.startswith("backstay.")}
    return units - {"__version__"}


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield from [statement, *runtime_nodes(statement)]
        else:
            yield from [child, *runtime_nodes(child)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LEVEL, f"{unit} is new: give it a place in LAYERS"
    for other in imported_units(path) - {unit}:
        assert LEVEL[other] <= LEVEL[unit], f"{unit} imports {other}, which is above it"
        assert {unit, other} != {"save", "load"}, "save and load never import each other"


@pytest.mark.parametrize("module", [module for module in TORCH_FREE if is_written(module)])
def test_a_module_for_the_writer_or_for_looking_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(str({{'torch', 'numpy'}} & {{*sys.modules}} or ''))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stderr.strip() == ""
