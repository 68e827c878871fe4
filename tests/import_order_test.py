"""Checks that modules import only from earlier import groups, and that packages have no import cycles."""

import ast
import functools
import graphlib
import pathlib

import pytest

from config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = """
runtime
config
resnet objective lars_optimizer metrics data_util
augmentation sources large_batch probing
data model
simclr
checkpoints
export
evaluate
checks train inference
run transfer
paper benchmarks
"""
GROUP_OF = {name: row for row, line in enumerate(GROUPS.splitlines()) for name in line.split()}
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
MODULES = sorted(
    path for name in GROUP_OF for path in [*ROOT.glob(f"{name}.py"), *ROOT.glob(f"{name}/**/*.py")]
)


def name_of(path):
    """Returns the dotted name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def syntax_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """Returns the dotted names that a file imports, including local imports and modules loaded by name."""
    names = []
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            match ast.unparse(node.func), node.args:
                case "tensorflow_startup.load", [ast.Constant(name)]:
                    names.append(name)
    return names


def test_every_module_has_an_import_group():
    assert {path.stem for path in ROOT.glob("*.py")} | {*PACKAGES} == GROUP_OF.keys()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_only_from_earlier_groups(path):
    importer, *is_in_package = path.relative_to(ROOT).with_suffix("").parts
    for imported in imports(path):
        name = imported.split(".")[0]
        is_own = is_in_package and name == importer
        assert is_own or GROUP_OF.get(name, -1) < GROUP_OF[importer], imported


def listed_settings(tree):
    """Yields, for each tuple, list or set literal in a syntax tree, the setting names that it contains."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            values = {element.value for element in node.elts if isinstance(element, ast.Constant)}
            yield values & set(Config.__dataclass_fields__)


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem != "config"], ids=name_of)
def test_settings_are_classified_only_in_config(path):
    """Checks that modules other than config.py list only a few settings at a time, and only inside functions."""
    tree = syntax_of(path)
    constants = [
        node
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and "_CIFAR_COLUMNS" not in ast.unparse(node)[:20]  # names of columns in CSV files
    ]
    assert not [names for node in constants for names in listed_settings(node) if len(names) > 1]
    assert not [names for names in listed_settings(tree) if len(names) > 4]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_have_no_import_cycles(package):
    graph = {}
    for path in (ROOT / package).glob("*.py"):
        graph[name_of(path)] = {
            ".".join(imported.split(".")[:2])
            for imported in imports(path)
            if imported.startswith(f"{package}.")
        }
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_test_modules_do_not_import_each_other():
    names = {path.stem for path in ROOT.glob("tests/**/*_test.py")}
    for path in ROOT.glob("tests/**/*.py"):
        assert not any(set(imported.split(".")) & names for imported in imports(path)), path


def test_code_uses_tf_keras_instead_of_keras():
    for path in [*MODULES, *ROOT.glob("tests/**/*.py")]:
        assert "keras" not in {imported.split(".")[0] for imported in imports(path)}, path
        assert ("tf" + ".keras") not in path.read_text(), path
