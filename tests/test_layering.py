# SPDX-License-Identifier: Apache-2.0
"""The architecture, held by reading the sources: who may import whom, and who may name whom.

Nothing here imports torch; the tests that watch an import do it in a process of their own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "qompose"
PLUGINS = {
    "qompose_xnnpack": ROOT / "plugins" / "xnnpack",
    "qompose_x86_inductor": ROOT / "plugins" / "x86_inductor",
    "qompose_embedding": ROOT / "plugins" / "embedding",
}

# Lowest first. A module imports only from lines above its own, never from its own line: so the
# stages, which share a line, never import one another. A new module needs a place here.
LAYERS = tuple(
    line.split()
    for line in """
        errors hookspecs histogram sampling shortcuts fingerprints repeats progress switches
        repairs conformity
        repairs.words
        aliases running operators offers faults kinship strides channel_histograms
        numerics graph screening functionals fbgemm encoding drafts factories row_sample range_search
        decomposed nested recording input_checks facts tensor_screening processes
        decompositions sources modes flow calls repairs.means computed_weights
        exported
        specs observers rewrites evaluation balancing schemes reference guarding
        histogram_observers fake_quantize likeness
        learned schedules
        configs bounds roles usual_specs training_specs
        claims selectors observing soundness
        apart patterns oversight orphans
        arbitration annotations tying counting rendering places constraints
        diagnosis diagnosis.comparison diagnosis.markup diagnosis.entries diagnosis.layout
        diagnosis.colours diagnosis.belonging
        diagnosis.pictures
        diagnosis.charts
        diagnosis.page
        selection layouts
        rules
        querying quantized_tensors
        capability_row
        capabilities
        backend region matching
        plan signature plugins operands configuring covering ordering
        requirements sites ranks training restoring batches repairs.homogeneous repairs.products
        repairs.equalization repairs.smoothing
        statistics_files isolation exported_modes
        collecting
        checkpoints linting
        hosting
        subjects factoring delegation adding leftovers
        survey quantizer estimation ledger scaffolding
        repairs.correction
        interop.process interop.output
        interop.comparing interop.references
        interop.examples interop.execution
        interop.correspondence
        interop.regions interop.pairing
        interop.equivalence interop.naming interop.bodies
        interop.splicing interop.settling
        interop.fence interop.constants interop.marks interop.alignment interop.sizes
        interop.asking
        interop rule_quantizer composition restraining
        transforming
        annotating planning preparation calibration conversion lowering representation membership
        reporting benchmarking packages late_operators
        compiling
        diagnosis.costs diagnosis.stepping
        diagnosis.sides
        diagnosis.pairing
        diagnosis.tallies diagnosis.lockstep
        diagnosis.tables
        diagnosis.comparing
        diagnosis.switching
        diagnosis.sensitivity
        values announcing
        symbols storages trees
        programs records artefact_files manifest bitpacking
        composing pipeline
        artefact
        diagnosis.exclusion diagnosis.kept
        quantizing inquiry diagnosis.tuned
        diagnosis.evaluating
        diagnosis.tuning
        commands commands.output commands.program_archives
        commands.program_files
        commands.checking commands.calibration_files commands.report
        commands.choosing
        commands.calibrate commands.backends commands.capabilities commands.quantize commands.new_backend
        cli
        __init__ __main__
        testing.failures testing.data testing.measures testing.examples testing.models testing.limits
        testing.building
        testing.trials
        testing.suite testing.varying
        testing.whole testing.sources
        testing.rows
        testing.agreeing
        testing.accepting testing.training testing.behaviour testing.effects testing.precedence
        testing.together
        testing.parameters
        testing.contract
        testing
    """.strip().splitlines()
)
LAYER = {module: number for number, line in enumerate(LAYERS) for module in line}

# (importer, imported): names that only type checkers import, so that nothing depends upwards at run time.
FOR_TYPES_ONLY = {("hookspecs", "backend"), ("rules", "region")}

# What the modules that must be quick to import may import besides the standard library.
QUICK = {
    "errors": set(),
    "hookspecs": {"pluggy"},
    "offers": {"importlib_metadata"},
    "faults": {"pluggy", "importlib_metadata"},
    "plugins": {"pluggy", "importlib_metadata"},
    "scaffolding": {"importlib_metadata"},
}

MAX_FILE_LINES = 400
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
    """Every source file of the four distributions."""
    return sorted(
        path
        for folder in (CORE, *(PLUGINS[name] / name for name in PLUGINS))
        for path in folder.rglob("*.py")
    )


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
        if source == "qompose":
            yield (name if name in LAYER else "__init__"), for_types
        elif source.startswith("qompose."):
            yield source.removeprefix("qompose."), for_types


def public_names() -> dict[str, str]:
    """Return the module of each public name, read from `_MODULES` without running it."""
    for node in tree(MODULES["__init__"]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            table: dict[str, str] = ast.literal_eval(node.value)
            pairs = [(name, module) for module, names in table.items() for name in names.split()]
            assert len(dict(pairs)) == len(pairs), "a name is listed twice"
            return dict(pairs)
    raise AssertionError("core/qompose/__init__.py has no table _MODULES")


def python(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestCore:
    """The layers of core."""

    def test_every_module_has_one_layer(self) -> None:
        listed = [module for line in LAYERS for module in line]
        assert sorted(listed) == sorted(MODULES)

    @pytest.mark.parametrize("module", MODULES)
    def test_imports_point_downwards(self, module: str) -> None:
        wrong = {
            imported
            for imported, for_types in core_imports(module)
            if LAYER.get(imported, len(LAYERS)) >= LAYER.get(module, -1)
            and not (for_types and (module, imported) in FOR_TYPES_ONLY)
            and not (for_types and module == "__init__")
        }
        assert not wrong, f"{module} imports {', '.join(sorted(wrong))} from its own layer or above"

    def test_allowances_are_used(self) -> None:
        used = {
            (module, imported)
            for module in MODULES
            for imported, for_types in core_imports(module)
            if for_types
        }
        assert used >= FOR_TYPES_ONLY

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
        """Prose may name the operators; code takes them from `decomposed`."""
        naming = {name for name, path in MODULES.items() if "quantized_decomposed" in code(path)}
        assert naming == {"decomposed"}


# The names of plugins and of what they wrap, in lower case. "embedding" alone is also torch's word for
# a layer, so core may use it; "executorch" and "inductor" are runtimes that plugins bring.
FOREIGN = ("xnnpack", "x86", "inductor", "executorch", "qompose_embedding", "onednn")
# (module, name): in prose only. These say who else knows an operator set, and whose quantizers are adapted.
PROSE = {("decomposed", "executorch"), ("decomposed", "inductor"), ("interop", "executorch")}


# What torch itself calls its compiler, and the operators that it calls.
TORCHS_OWN = {
    ("commands.program_archives", "inductor"),
    ("compiling", "inductor"),
    ("late_operators", "inductor"),
    ("packages", "inductor"),
    ("packages", "onednn"),
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


def code(path: Path) -> str:
    """Return a module's code, in lower case, without comments and docstrings."""
    return ast.unparse(without_prose(tree(path))).lower()


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
        public = {*public_names(), "__version__"}
        wrong = [
            f"{path.name}: {source} {name}".strip()
            for path in sorted((PLUGINS[plugin] / plugin).rglob("*.py"))
            for source, name, _ in imports(tree(path))
            if source.startswith("qompose.")
            or (source == "qompose" and name and name not in public)
        ]
        assert not wrong

    @pytest.mark.parametrize("plugin", PLUGINS)
    def test_plugins_use_public_attributes(self, plugin: str) -> None:
        """`import qompose` and then `qompose.name`."""
        public = {*public_names(), "__version__"}
        used = {
            node.attr
            for path in (PLUGINS[plugin] / plugin).rglob("*.py")
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "qompose"
        }
        assert used <= public

    @pytest.mark.parametrize("plugin", PLUGINS)
    def test_plugins_do_not_know_one_another(self, plugin: str) -> None:
        others = set(PLUGINS) - {plugin}
        imported = {
            source.partition(".")[0]
            for path in (PLUGINS[plugin] / plugin).rglob("*.py")
            for source, _, _ in imports(tree(path))
        }
        assert not imported & others


class TestPublicNames:
    """`import qompose`."""

    def test_all_resolve(self) -> None:
        names = sorted(public_names())
        check = (
            "import qompose, sys\n"
            f"assert qompose.__all__ == {names!r}, qompose.__all__\n"
            "for name in qompose.__all__: getattr(qompose, name)\n"
            "assert set(qompose.__all__) <= set(dir(qompose))\n"
            "print(qompose.__version__)"
        )
        assert python(check).strip()

    def test_type_checkers_see_the_same_names(self) -> None:
        seen = {
            name: source.removeprefix("qompose.")
            for source, name, for_types in imports(tree(MODULES["__init__"]))
            if for_types
        }
        assert seen == public_names()

    @pytest.mark.parametrize(
        "statement",
        [
            "import qompose; dir(qompose); qompose.backends()",
            "import qompose.plugins as plugins; plugins.backends()",
            "import qompose.cli; qompose.cli.main(['backends', '--json'])",
            "from qompose import hookimpl, PluginError, API_VERSION",
        ],
    )
    def test_torch_is_not_imported(self, statement: str) -> None:
        loaded = python(f"{statement}\nimport sys; print('\\n', *sys.modules)").split()
        assert "torch" not in loaded
        assert not [name for name in loaded if name.startswith("qompose_")]


class TestSizes:
    """Small files, small functions."""

    def test_files(self) -> None:
        sizes = {
            str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in sources()
        }
        assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}

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
