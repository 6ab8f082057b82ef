"""Imports inside the package only point down, and what the writer loads is free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import backstay

PACKAGE = Path(backstay.__file__).parent
# Lower layers first. `save` and `load` share a layer and never see each other.
LAYERS = [
    {"errors", "events", "points"},
    {"manifest"},
    {"policies"},
    {"attempts", "storage", "coordination", "codec", "naming", "frames"},
    {"catalog", "state"},
    {"save", "load"},
    {"checkpointer"},
    {"interop", "testing", "training"},
    {"recipes", "integrations"},
    {"cli"},
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
TORCH_FREE = [
    "backstay",
    "backstay.attempts",
    "backstay.catalog",
    "backstay.errors",
    "backstay.manifest",
    "backstay.points",
    "backstay.policies",
    "backstay.storage.local",
    "backstay.save.writer_main",
    "backstay.save.writer_process",
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "backstay":
            names |= {f"backstay.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[1] for name in names if name.startswith("backstay.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    for other in imported_units(path) - {unit}:
        assert LEVEL[other] <= LEVEL[unit], f"{unit} imports {other}, which is above it"
        assert {unit, other} != {"save", "load"}, "save and load never import each other"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_module_for_the_writer_or_for_looking_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(str({{'torch', 'numpy'}} & {{*sys.modules}} or ''))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stderr.strip() == ""
