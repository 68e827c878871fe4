"""Checks that modules import only from earlier import groups, and that packages have no import cycles."""

import ast
import graphlib
import pathlib

import pytest

from config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = [
    {"runtime"},
    {"config"},
    {"resnet", "objective", "lars_optimizer", "metrics", "data_util"},
    {"augmentation", "sources", "large_batch", "probing"},
    {"data", "model"},
    {"simclr"},
    {"checkpoints"},
    {"export"},
    {"evaluate"},
    {"checks", "train", "inference"},
    {"run", "transfer"},
    {"paper", "benchmarks"},
]
GROUP_OF = {name: number for number, names in enumerate(GROUPS) for name in names}
MODULES = sorted(
    path for name in GROUP_OF for path in [*ROOT.glob(f"{name}.py"), *ROOT.glob(f"{name}/**/*.py")]
)


def name_of(path):
    """Returns the dotted name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """Yields the dotted names that a file imports, including local imports and modules loaded by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "tensorflow_startup.load"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def test_every_module_has_an_import_group():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert {path.stem for path in ROOT.glob("*.py")} | packages == set(GROUP_OF)
    assert len(list(ROOT.glob("*.py"))) == 13


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_only_from_earlier_groups(path):
    importer = name_of(path).split(".")[0]
    for imported in imports(path):
        name = imported.split(".")[0]
        assert (
            name == importer and path.parent != ROOT or GROUP_OF.get(name, -1) < GROUP_OF[importer]
        ), imported


def listed_settings(tree):
    """Yields, for each tuple, list or set literal in a syntax tree, the setting names that it contains."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            values = {element.value for element in node.elts if isinstance(element, ast.Constant)}
            yield values & set(Config.__dataclass_fields__)


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem != "config"], ids=name_of)
def test_settings_are_classified_only_in_config(path):
    """Checks that modules other than config.py list only a few settings at a time, and only inside functions."""
    tree = ast.parse(path.read_text())
    constants = [
        node
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and "_CIFAR_COLUMNS" not in ast.unparse(node)[:20]  # names of columns in CSV files
    ]
    assert not [names for node in constants for names in listed_settings(node) if len(names) > 1]
    assert not [names for names in listed_settings(tree) if len(names) > 4]


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
def test_packages_have_no_import_cycles(package):
    graph = {}
    for path in (ROOT / package).glob("*.py"):
        graph[name_of(path)] = {
            ".".join(imported.split(".")[:2])
            for imported in imports(path)
            if imported.startswith(f"{package}.")
        }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # Raises CycleError.
    assert set(order) >= set(graph)


def test_test_modules_do_not_import_each_other():
    names = {path.stem for path in ROOT.glob("tests/**/*_test.py")}
    for path in ROOT.glob("tests/**/*.py"):
        assert not any(set(imported.split(".")) & names for imported in imports(path)), path


def test_code_uses_tf_keras_instead_of_keras():
    for path in ROOT.glob("**/*.py"):
        if ".venv" not in str(path):
            assert "keras" not in {imported.split(".")[0] for imported in imports(path)}, path
            assert ("tf" + ".keras") not in path.read_text(), path
