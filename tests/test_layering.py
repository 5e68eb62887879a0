# SPDX-License-Identifier: Apache-2.0
"""The architecture, held by reading the sources: circles, quick imports, names, and sizes.

Floors, and plugins that must not know one another, are import-linter's: see pyproject.toml.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from tests.processes import python

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "qompose"
PLUGINS = {
    "qompose_xnnpack": ROOT / "plugins" / "xnnpack",
    "qompose_x86_inductor": ROOT / "plugins" / "x86_inductor",
    "qompose_embedding": ROOT / "plugins" / "embedding",
    "qompose_onnx": ROOT / "plugins" / "onnx",
}

# What the modules that must be quick to import may import besides the standard library.
QUICK = {
    "__init__": {"lazy_loader"},
    "errors": set(),
    "backend": {"lazy_loader"},
    "backend.discovery": {"pluggy", "importlib_metadata"},
    "cli.new_backend": {"importlib_metadata"},
}

MAX_CORE_MODULES, MAX_TOP_FILES, MAX_PUBLIC_NAMES = 150, 9, 40
MAX_FUNCTION_LINES = 60


def core_modules() -> dict[str, Path]:
    """Return the file of every module of core by its dotted name below the package."""
    found = {}
    for path in sorted(CORE.rglob("*.py")):
        name = path.relative_to(CORE).with_suffix("").as_posix().replace("/", ".")
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = core_modules()


def sources() -> list[Path]:
    """Every source file of the five distributions."""
    return sorted(
        path
        for folder in (CORE, *(PLUGINS[name] / name for name in PLUGINS))
        for path in folder.rglob("*.py")
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(node: ast.AST, for_types: bool = False) -> Iterator[tuple[str, str, bool]]:
    """Yield (module, name, whether only for type checkers); name is "" for `import module`."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from imports(child, True)
        for child in node.orelse:
            yield from imports(child, for_types)
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, "", for_types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        yield from ((module, alias.name, for_types) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, for_types)


def core_imports(module: str) -> Iterator[tuple[str, bool]]:
    """Yield the core modules that a core module imports, and whether only for type checkers."""
    for source, name, for_types in imports(tree(MODULES[module])):
        assert not source.startswith("."), f"{module}: relative import of {source}"
        if source == "qompose" or source.startswith("qompose."):
            base = source.removeprefix("qompose").lstrip(".")
            inner = f"{base}.{name}".lstrip(".")
            yield (inner if inner in MODULES else base or "__init__"), for_types


def room(module: str) -> str:
    """Return the package of a core module, or its own name at the top."""
    return module.partition(".")[0]


def exported(path: Path) -> set[str]:
    """Return the names that a stub or a module imports to be seen, or lists in `__all__`."""
    return {
        name
        for node in tree(path).body
        if isinstance(node, ast.ImportFrom)
        for name in (alias.asname for alias in node.names)
        if name
    }


@cache
def public_names() -> dict[str, set[str]]:
    """Return the public names of core's face and of each public submodule, read without running them."""
    submodules = {
        alias.name
        for node in tree(CORE / "__init__.pyi").body
        if isinstance(node, ast.ImportFrom) and node.module is None
        for alias in node.names
    }
    found = {"qompose": exported(CORE / "__init__.pyi") - submodules}
    for name in sorted(submodules):
        stub = CORE / name / "__init__.pyi"
        found[f"qompose.{name}"] = exported(stub) if stub.exists() else listed(name)
    found["qompose.backend.kit"] = exported(CORE / "backend" / "kit" / "__init__.pyi")
    return found


def listed(submodule: str) -> set[str]:
    """Return what `__all__` of a submodule lists, or the classes of a plain module."""
    module = tree(MODULES[submodule])
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return {node.name for node in module.body if isinstance(node, ast.ClassDef)}


class TestCore:
    """The modules of core."""

    def test_nothing_below_the_face_reads_it(self) -> None:
        """Its names are found late, so import-linter and the test of circles cannot see where they lead."""
        above = {"__main__", "cli", "testing"}
        reading = {
            room(m) for m in MODULES if any(name == "__init__" for name, _ in core_imports(m))
        }
        assert reading <= above

    def test_no_module_imports_itself_through_others(self) -> None:
        order = TopologicalSorter(
            {
                module: {imported for imported, for_types in core_imports(module) if not for_types}
                - {room(module)}  # a package runs before its modules, and shows them
                for module in MODULES
            }
        )
        order.prepare()

    def test_no_room_is_called_like_a_public_function(self) -> None:
        """A submodule of that name would shadow the function as soon as anything imports it."""
        functions = {name for name in public_names()["qompose"] if name.islower()}
        assert not functions & {room(module) for module in MODULES}

    @pytest.mark.parametrize("module", sorted(QUICK))
    def test_modules_that_list_plugins_are_quick(self, module: str) -> None:
        """At the top of a module; what a function imports, it imports when it is called."""
        outside = {
            source.partition(".")[0]
            for statement in tree(MODULES[module]).body
            if isinstance(statement, (ast.Import, ast.ImportFrom))
            for source, _, _ in imports(statement)
        }
        assert outside - sys.stdlib_module_names - {"qompose"} <= QUICK[module]

    def test_quantized_decomposed_is_named_in_one_module(self) -> None:
        """Prose may name the operators; code takes them from `spec.qdq`."""
        naming = {name for name, path in MODULES.items() if "quantized_decomposed" in code(path)}
        assert naming == {"spec.qdq"}


# The names of plugins and of what they wrap, in lower case. "embedding" alone is also torch's word for
# a layer, so core may use it; "executorch" and "inductor" are runtimes that plugins bring.
FOREIGN = ("xnnpack", "x86", "inductor", "executorch", "qompose_embedding", "onednn", "onnx")
# (module, name): in prose only. These say who else knows an operator set, and whose quantizers are adapted.
PROSE = {
    ("spec.qdq", "executorch"),
    ("spec.qdq", "inductor"),
    ("quantizer.interop.foreign_quantizer", "executorch"),
}


# What torch itself calls its compiler, and the operators that it calls.
TORCHS_OWN = {
    ("lowering.compilation", "inductor"),
    ("lowering.aoti_package", "inductor"),
    ("lowering.aoti_package", "onednn"),
}


def without_prose(module: ast.Module) -> ast.Module:
    """Drop docstrings: strings that are statements of their own."""
    for node in ast.walk(module):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                kept = [s for s in block if not (isinstance(s, ast.Expr) and is_string(s.value))]
                setattr(node, field, kept)
    return module


def is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@cache
def code(path: Path) -> str:
    """Return a module's code, in lower case, without comments and docstrings."""
    return ast.unparse(without_prose(ast.parse(path.read_text(encoding="utf-8")))).lower()


class TestNames:
    """Core knows no plugin; plugins know core's public names."""

    @pytest.mark.parametrize("module", MODULES)
    def test_core_names_no_plugin(self, module: str) -> None:
        path = MODULES[module]
        in_code = {(module, name) for name in FOREIGN if name in code(path)}
        assert in_code == {pair for pair in TORCHS_OWN if pair[0] == module}
        in_prose = {(module, name) for name in FOREIGN if name in path.read_text("utf-8").lower()}
        assert in_prose <= PROSE | TORCHS_OWN

    @pytest.mark.parametrize("plugin", PLUGINS)
    def test_plugins_import_public_names(self, plugin: str) -> None:
        public = dict(public_names())
        public["qompose"] = public["qompose"] | {
            "__version__",
            *(name.partition(".")[2] for name in public),
        }
        wrong = [
            f"{path.name}: {source} {name}".strip()
            for path in sorted((PLUGINS[plugin] / plugin).rglob("*.py"))
            for source, name, _ in imports(tree(path))
            if (source.startswith("qompose.") or (source == "qompose" and name))
            and name not in public.get(source, ())
        ]
        assert not wrong

    @pytest.mark.parametrize("plugin", PLUGINS)
    def test_plugins_use_public_attributes(self, plugin: str) -> None:
        """`import qompose` and then `qompose.name` or `qompose.submodule.name`."""
        public = {f"{module}.{name}" for module, names in public_names().items() for name in names}
        used = {
            ast.unparse(node)
            for path in (PLUGINS[plugin] / plugin).rglob("*.py")
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("qompose.")
        }
        submodules = set(public_names())
        wrong = {
            path
            for path in used - submodules
            if not any(path == name or path.startswith(f"{name}.") for name in public)
        }
        assert not wrong


class TestPublicNames:
    """`import qompose`."""

    def test_there_are_few(self) -> None:
        assert len(public_names()["qompose"]) <= MAX_PUBLIC_NAMES

    @pytest.mark.parametrize("module", public_names())
    def test_all_resolve(self, module: str) -> None:
        face, names = import_module(module), public_names()[module]
        assert set(getattr(face, "__all__", names)) == names
        assert names <= set(dir(face))
        for name in names:
            getattr(face, name)

    def test_version(self) -> None:
        assert python("-c", "import qompose; print(qompose.__version__)").strip()

    @pytest.mark.parametrize(
        "statement",
        [
            "import qompose; dir(qompose); qompose.backends()",
            "import qompose.backend as backend; dir(backend); backend.backends()",
            "from qompose.cli.main import main; main(['backends', '--json'])",
            "from qompose.backend import hookimpl, API_VERSION; from qompose.errors import PluginError",
        ],
    )
    def test_torch_is_not_imported(self, statement: str) -> None:
        loaded = python("-c", f"{statement}\nimport sys; print('\\n', *sys.modules)").split()
        assert "torch" not in loaded
        assert not [name for name in loaded if name.startswith("qompose_")]


class TestSizes:
    """A house that can be seen, and small functions."""

    def test_core(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The house at a glance; `-s` prints it."""
        own = [name for name, path in MODULES.items() if path.name != "__init__.py"]
        top = [path for path in CORE.iterdir() if path.suffix in (".py", ".typed")]
        rooms = {room(name) for name in own if "." in name}
        lines = sum(path.read_text("utf-8").count("\n") for path in MODULES.values())
        tests = sum(p.read_text("utf-8").count("\n") for p in (ROOT / "tests").rglob("*.py"))
        with capsys.disabled():
            print(
                f"\ncore: {len(own)} modules, {len(top)} files at its top, {len(rooms)} packages, "
                f"{lines} lines; {len(public_names()['qompose'])} public names; "
                f"tests: {tests} lines"
            )
        assert len(own) <= MAX_CORE_MODULES
        assert len(top) <= MAX_TOP_FILES

    def test_functions(self) -> None:
        """Lines of a function without its docstring."""
        sizes = {
            f"{path.relative_to(ROOT)}:{node.name}": node.end_lineno - node.lineno + 1 - prose(node)
            for path in sources()
            for node in ast.walk(tree(path))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
        }
        assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}

    def test_licence_headers(self) -> None:
        header = "# SPDX-License-Identifier: Apache-2.0\n"
        bare = [
            str(p.relative_to(ROOT))
            for p in sources()
            if not p.read_text("utf-8").startswith(header)
        ]
        assert bare == []


def prose(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    if isinstance(first, ast.Expr) and is_string(first.value) and first.end_lineno:
        return first.end_lineno - first.lineno + 1
    return 0
