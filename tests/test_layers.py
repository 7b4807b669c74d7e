"""The arrows between modules, and the doors to the outside. README.md has the table."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.jobs import ROOT

# A module may import only from lines above its own.
LAYERS = [
    ("ps.errors", "ps.files", "ps.bounded"),
    ("ps.faults", "ps.processes"),
    ("ps.log", "ps.schedule", "ps.topology", "ps.machine", "ps.flat", "ps.pacing"),
    ("ps.health",),
    ("ps.interruption", "ps.config", "ps.protocol", "ps.gate", "ps.links.channel"),
    ("ps.orders", "ps.randomness", "ps.devices", "ps.store", "ps.workload", "ps.rundir"),
    ("ps.metrics", "ps.passes", "ps.workloads.mnist_files", "ps.workloads.images"),
    ("ps.checkpoint", "ps.watch"),
    ("ps.compute", "ps.loading", "ps.workloads.mnist", "ps.workloads.digits"),
    ("ps.server", "ps.step", "ps.workloads.catalogue"),
    ("ps.links.answers", "ps.links.rendezvous", "ps.links.shelf", "ps.footprint"),
    ("ps.links.local", "ps.links.rpc"),
    ("ps.links.choice", "ps.doctor"),
    ("ps.trainer", "ps.preparation", "ps.injection"),
    ("ps.parts",),
    ("ps.ending",),
    ("ps.run", "ps.__main__"),
    ("launch",),
]
DOORS = {
    "torch.distributed": {"ps.links.rendezvous", "ps.links.rpc"},
    "torch.optim": {"ps.store"},
    "psutil": {"ps.processes"},
    "fcntl": {"ps.rundir", "ps.processes"},
    "torchvision": {"ps.workloads.mnist_files"},
    "argparse": {"ps.config", "ps.__main__"},
    "signal": {"ps.interruption", "ps.processes", "ps.injection"},
    "faulthandler": {"ps.interruption", "ps.watch"},
    "select": {"ps.watch"},
    "subprocess": {"ps.workloads.mnist_files"},
    "importlib": {"ps.workload"},
    "ctypes": {"ps.machine"},
    "socket": {
        *("ps.gate", "ps.links.channel", "ps.links.rendezvous", "ps.workloads.mnist_files"),
        "ps.doctor",
    },
    "multiprocessing": {"ps.links.channel", "ps.loading"},
    "concurrent": {"ps.loading"},
    "mmap": {"ps.links.channel"},
    "pickle": {"ps.links.channel"},
}
NO_TORCH = {
    *("launch", "ps.errors", "ps.files", "ps.log", "ps.schedule", "ps.topology", "ps.machine"),
    *("ps.config", "ps.gate", "ps.interruption", "ps.rundir", "ps.preparation", "ps.pacing"),
    *("ps.health", "ps.faults", "ps.processes", "ps.footprint", "ps.doctor", "ps.watch"),
    *("ps.workloads.mnist_files", "ps.workloads.catalogue", "ps.bounded"),
}
FOLDERS = ("ps/links/", "ps/workloads/")
PATHS = [ROOT / "launch.py", *sorted((ROOT / "ps").rglob("*.py"))]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in PATHS
    if path.name != "__init__.py"
}


def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, `from a import b` as a and a.b, without type-checking ones."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if module in layer)


def test_every_module_has_a_layer_and_every_layer_its_modules() -> None:
    assert sorted(SOURCES) == sorted(module for layer in LAYERS for module in layer)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module: str) -> None:
    for name in imports_of(SOURCES[module]) & SOURCES.keys():
        assert layer_of(name) < layer_of(module), f"{module} imports {name}"


@pytest.mark.parametrize("door", DOORS)
def test_each_outside_thing_has_one_door(door: str) -> None:
    """A use counts as an import, as an import in a program that is handed to Python, or as text."""
    pattern = re.compile(rf"\b(import|from) {re.escape(door)}\b")
    users = {
        module
        for module, path in SOURCES.items()
        if pattern.search(text := path.read_text())
        or any(name == door or name.startswith(f"{door}.") for name in imports_of(path))
        or (door == "torch.optim" and "torch.optim." in text)
    }
    assert users == DOORS[door]


def test_the_readme_has_every_module_in_its_table() -> None:
    table = (ROOT / "README.md").read_text().partition("## Modules")[2]
    for path in SOURCES.values():
        name = path.relative_to(ROOT).as_posix()
        folders = [folder for folder in FOLDERS if name.startswith(folder)]
        assert any(f"| `{text}` |" in table for text in (name, *folders)), name


def test_the_readme_names_no_module_that_is_not_there() -> None:
    named = re.findall(
        r"`((?:ps/[a-z_/]*|launch)\.py|ps/[a-z_/]+/)`", (ROOT / "README.md").read_text()
    )
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_package_is_installed_with_every_folder() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "ps").rglob("__init__.py")}
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)


@pytest.mark.parametrize("module", sorted(NO_TORCH))
def test_what_answers_before_torch_is_loaded_does_not_import_it(module: str) -> None:
    names = imports_of(SOURCES[module], top_level_only=True)
    assert not [name for name in names if name.split(".")[0] in ("torch", "torchvision")]
    assert (names & SOURCES.keys()) <= NO_TORCH


def test_the_environment_is_read_by_the_entry_and_set_for_rpc_alone() -> None:
    users = {module for module, path in SOURCES.items() if "os.environ" in path.read_text()}
    assert users == {"launch", "ps.links.rendezvous"}


def test_modules_that_only_decide_have_no_torch_no_clock_and_no_lock() -> None:
    """So that every case can be tried without waiting."""
    for module in ("ps.pacing", "ps.orders", "ps.metrics"):
        names = imports_of(SOURCES[module])
        assert not names & {"torch", "time", "threading", "os"}, module
