"""Who may import whom: agents -> textenv -> numpy and gymnasium, never the other way, never by a bare name.

Read from the source rather than tried out, so that an import inside a function or under ``TYPE_CHECKING`` counts too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"textenv": "textenv", "agents": "textenv.agents", "wrappers": "textenv.wrappers"}
TORCH_ROOMS = ("textenv.lm", "textenv.rewards")


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    name: str
    """Absolute dotted name; for ``from a import b`` there is one record for ``a`` and one for ``a.b``."""
    line: int
    on_load: bool
    """True if importing the module runs it: outside functions and outside ``if TYPE_CHECKING``."""

    def within(self, *packages: str) -> bool:
        return any(self.name == package or self.name.startswith(f"{package}.") for package in packages)


def imports_of(source: str, module: str, is_package: bool = False) -> list[Import]:
    """All imports of a module's source, at any depth, dynamic ones with a constant name included."""
    parent = module if is_package else module.rpartition(".")[0]
    return list(_imports(ast.parse(source), parent, on_load=True))


def _imports(node: ast.AST, parent: str, on_load: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, node.lineno, on_load) for alias in names)
        case ast.ImportFrom(module=name, names=names, level=level):
            up = parent.split(".")[: 1 - level or None] if level else []  # one dot is the parent itself
            base = ".".join([*up, *([name] if name else [])])
            yield Import(base, node.lineno, on_load)
            yield from (Import(f"{base}.{alias.name}", node.lineno, on_load) for alias in names)
        case ast.Call(
            func=ast.Name(id=function) | ast.Attribute(attr=function), args=[ast.Constant(value=str(name)), *_]
        ):
            if function in ("import_module", "__import__"):
                yield Import(f"{parent}{name}" if name.startswith(".") else name, node.lineno, on_load)
    for field, value in ast.iter_fields(node):
        deferred = field == "body" and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _imports(child, parent, on_load and not deferred)


def third_party(imports: list[Import]) -> list[Import]:
    return [i for i in imports if i.name.split(".")[0] not in sys.stdlib_module_names]


# The rules. Each names the imports that break it.


def breaks_one_way(module: str, imports: list[Import]) -> list[Import]:
    """Only agents import agents."""
    return [] if in_package(module, "textenv.agents") else [i for i in imports if i.within("textenv.agents", "agents")]


def breaks_bare_names(_module: str, imports: list[Import]) -> list[Import]:
    """`agents` and `wrappers` are names of the user's own folders."""
    return [i for i in imports if i.within("agents", "wrappers")]


def breaks_light_core(module: str, imports: list[Import]) -> list[Import]:
    """Loading the environment and its wrappers takes numpy and gymnasium only."""
    if in_package(module, "textenv.agents", *TORCH_ROOMS):
        return []
    return [i for i in third_party(imports) if i.on_load and not i.within("numpy", "gymnasium", "textenv")]


def breaks_pure_torch(module: str, imports: list[Import]) -> list[Import]:
    """The formulas know tensors, their records and each other."""
    formulas = ("textenv.agents.advantages", "textenv.agents.losses")
    if module not in formulas:
        return []
    allowed = ("torch", "jaxtyping", "textenv.agents.types", *formulas)
    packages = ("textenv", "textenv.agents")  # `from textenv.agents import types` passes through these
    return [i for i in third_party(imports) if not i.within(*allowed) and i.name not in packages]


RULES = [breaks_one_way, breaks_bare_names, breaks_light_core, breaks_pure_torch]


def in_package(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def package_modules() -> dict[str, Path]:
    """Every module of the three folders by the name it is installed under."""
    modules = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return modules


def describe(path: Path, broken: list[Import]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}:{i.line} imports {i.name}" for i in broken)


@pytest.mark.parametrize("rule", RULES)
def test_every_module_keeps_the_rule(rule):
    modules = package_modules()
    broken = [
        describe(path, found)
        for module, path in modules.items()
        if (found := rule(module, imports_of(path.read_text(), module, path.name == "__init__.py")))
    ]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


def test_every_folder_was_read():
    modules = package_modules()
    expected = {*FOLDERS.values(), *TORCH_ROOMS, "textenv.agents.advantages", "textenv.agents.losses", "textenv.mdp"}
    assert expected <= modules.keys()


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_nobody_else_uses_bare_names(folder):
    broken = [
        describe(path, found)
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (found := breaks_bare_names("", imports_of(path.read_text(), path.stem)))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "module", "source", "broken"),
    [
        (breaks_one_way, "textenv.env", "def f():\n    if True:\n        from textenv.agents import PPO", True),
        (breaks_one_way, "textenv.env", "from textenv import agents", True),
        (breaks_one_way, "textenv.env", "from . import agents", True),
        (breaks_one_way, "textenv.lm.load", "from ..agents.types import Rollout", True),
        (breaks_one_way, "textenv.env", "import importlib\nimportlib.import_module('textenv.agents')", True),
        (breaks_one_way, "textenv.wrappers.kl", "if TYPE_CHECKING:\n    import textenv.agents.policy", True),
        (breaks_one_way, "textenv.agents.ppo", "from textenv.agents.types import Rollout", False),
        (breaks_one_way, "textenv.env", "from textenv.agents_of_change import x", False),
        (breaks_bare_names, "textenv.agents.ppo", "import wrappers.vector", True),
        (breaks_bare_names, "textenv.agents.ppo", "class A:\n    from agents import types", True),
        (
            breaks_bare_names,
            "textenv.agents.ppo",
            "from textenv import wrappers\nfrom gymnasium import wrappers",
            False,
        ),
        (breaks_light_core, "textenv.mdp", "try:\n    import torch\nexcept ImportError:\n    torch = None", True),
        (breaks_light_core, "textenv.wrappers.kl", "from torch import Tensor", True),
        (breaks_light_core, "textenv.toy", "class A:\n    import scipy", True),
        (breaks_light_core, "textenv.toy", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", True),
        (breaks_light_core, "textenv.toy", "def f():\n    import torch\nif TYPE_CHECKING:\n    import torch", False),
        (
            breaks_light_core,
            "textenv.toy",
            "import json, numpy.random\nfrom gymnasium import Env\nfrom .mdp import f",
            False,
        ),
        (breaks_light_core, "textenv.lm.load", "import torch", False),
        (breaks_pure_torch, "textenv.agents.losses", "def f():\n    import gymnasium", True),
        (breaks_pure_torch, "textenv.agents.advantages", "import numpy as np", True),
        (breaks_pure_torch, "textenv.agents.losses", "from textenv.agents import policy", True),
        (breaks_pure_torch, "textenv.agents.losses", "from .types import Stats\nfrom torch import Tensor", False),
        (breaks_pure_torch, "textenv.agents.losses", "from textenv.agents import types\nimport math, jaxtyping", False),
    ],
)
def test_a_rule_tells_bad_from_good(rule, module, source, broken):
    assert bool(rule(module, imports_of(source, module))) is broken


def test_relative_imports_of_a_package_are_resolved():
    names = [i.name for i in imports_of("from .env import A\nfrom . import mdp", "textenv", is_package=True)]
    assert names == ["textenv.env", "textenv.env.A", "textenv", "textenv.mdp"]


# What importing does, in a fresh interpreter.


def run_python(code: str, cwd: Path) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_heavy_package(tmp_path):
    code = "import sys, textenv; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(run_python(code, tmp_path).split())
    heavy = {"torch", "transformers", "vllm", "stable_baselines3", "peft", "accelerate", "matplotlib", "rich", "tyro"}
    assert {"textenv", "gymnasium"} <= loaded
    assert not loaded & heavy


def test_import_is_quick(tmp_path):
    """At most 0.3 s beyond gymnasium's own import; the quickest of five, since other processes only ever add time."""
    code = "import time, gymnasium\nstart = time.perf_counter()\nimport textenv\nprint(time.perf_counter() - start)"
    seconds = [float(run_python(code, tmp_path)) for _ in range(5)]
    assert min(seconds) < 0.3, f"import textenv took {min(seconds):.2f} s beyond gymnasium"
