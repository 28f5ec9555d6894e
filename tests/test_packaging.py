"""The wheel: one name at the top level, everything in it, and no clash with a user's own `agents/` and `wrappers/`."""

import email
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import textenv

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"textenv": "textenv", "agents": "textenv/agents", "wrappers": "textenv/wrappers"}

pytestmark = pytest.mark.slow


def run(*command: str | Path, **kwargs) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tree so that nothing is left behind in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, "--target", target, wheel)
    return target


def test_only_textenv_at_the_top_level(contents):
    top = {name.split("/")[0] for name in contents}
    assert "textenv" in top
    (other,) = top - {"textenv"}
    assert other.startswith("textenv-") and other.endswith(".dist-info")


def test_every_module_is_in_the_wheel(contents):
    """A sub-package missing from the list in pyproject.toml would be missing here."""
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert expected == {name for name in contents if name.endswith(".py")}


def test_every_asset_is_in_the_wheel(contents):
    assets = ROOT / "textenv" / "assets"
    names = {path.name for path in assets.iterdir() if path.is_file()}
    assert {f"textenv/assets/{name}" for name in names} <= contents
    assert "textenv/py.typed" in contents
    for kind in (".csv.gz", "LICENSE.txt", ".safetensors"):
        assert any(name.endswith(kind) for name in names), f"no {kind} in {assets}"


def test_metadata(wheel, contents):
    (name,) = (name for name in contents if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist")
    always = {line.split(">=")[0] for line in required if "extra ==" not in line}
    assert always == {"gymnasium", "numpy"}
    others = {"sb3", "tianshou", "torchrl", "minari"}
    assert {"train", "data", "reasoning", "vllm", "vllm-cpu", "demo", "dev"} | others == set(
        metadata.get_all("Provides-Extra")
    )
    assert metadata["License-Expression"] == "MIT"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents)


OWN_PACKAGE = """
if __name__ != {name!r}:
    raise ImportError(f"the researcher's {name} was imported as {{__name__}}")
OWNER = "researcher"
"""


@pytest.fixture
def research_folder(tmp_path) -> Path:
    """A folder with its own `agents` and `wrappers`, as a user's project may have."""
    folder = tmp_path / "research"
    for name in ("agents", "wrappers"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(OWN_PACKAGE.format(name=name))
        # Only a bare or misdirected import from within textenv would load these.
        for module in ("types", "policy", "ppo", "vector"):
            (folder / name / f"{module}.py").write_text("raise ImportError(__name__)\n")
    return folder


SCRIPT = """
import pathlib, sys

def home(module):
    return pathlib.Path(module.__file__).resolve()

expected_home = pathlib.Path(sys.argv[1]).resolve()
own_first = sys.argv[2] == "own first"
if own_first:
    import agents, wrappers

import gymnasium
import textenv, textenv.wrappers, textenv.wrappers.vector, textenv.agents, textenv.agents.rollouts

if not own_first:
    import agents, wrappers

assert agents.OWNER == wrappers.OWNER == "researcher"
assert home(agents).parent.parent == home(wrappers).parent.parent == pathlib.Path.cwd().resolve()
for module in (textenv, textenv.wrappers, textenv.wrappers.vector, textenv.agents, textenv.agents.rollouts):
    assert expected_home in home(module).parents, home(module)
assert not [name for name in sys.modules if name.startswith(("agents.", "wrappers."))]
gymnasium.make("textenv/Toy-v0").reset(seed=0)
"""


@pytest.mark.parametrize("order", ["own first", "textenv first"])
def test_installed_copy_leaves_bare_names_to_the_user(installed, research_folder, order):
    (research_folder / "study.py").write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run(sys.executable, "study.py", installed, order, cwd=research_folder, env=environment)


@pytest.mark.parametrize("order", ["own first", "textenv first"])
def test_checkout_leaves_bare_names_to_the_user(research_folder, order):
    """The same for the environment that runs the tests, whose install is editable."""
    (research_folder / "study.py").write_text(textwrap.dedent(SCRIPT))
    root = Path(textenv.__file__).resolve().parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(sys.executable, "study.py", root, order, cwd=research_folder, env=environment)
