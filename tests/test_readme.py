"""Every code block of the README runs: Python blocks as they stand, shell blocks by asking make what it would do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
PYTHON = [body for language, body in BLOCKS if language == "python"]
SHELL = [line for language, body in BLOCKS if language == "bash" for line in body.splitlines()]

# One iteration shows that a block works; the reader's two thousand episodes take minutes.
SHORTER = {"total_episodes=2_000": "total_episodes=64", "total_episodes=20_000": "total_episodes=2_000"}


def test_every_block_is_python_or_shell():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}
    assert len(PYTHON) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("block", range(len(PYTHON)))
def test_python_block_runs(block, tmp_path):
    code = PYTHON[block]
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    if "agent.save" in code:
        assert (tmp_path / "runs" / "first" / "state.json").exists()


@pytest.mark.parametrize("line", [line.split("#")[0].strip() for line in SHELL])
def test_shell_line_names_something_that_exists(line):
    command = line.split()
    if command[0] == "make":
        subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, check=True, capture_output=True)
    else:
        assert command[:2] == ["pip", "install"], f"unknown command {line!r}"


def test_files_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"(?:examples|benchmarks|docs|agents)/\w+\.(?:py|md)", text):
        assert (ROOT / path).exists(), path
