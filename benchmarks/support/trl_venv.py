"""TRL in a virtual environment of its own: what trains with it need not agree with what textenv is tested with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PINNED = {"torch": "2.13.0", "trl": "1.12.0", "transformers": "5.19.0", "peft": "0.21.2"}
"""trl 1.12 has `trl.experimental.ppo`, 1.16 has not; torch and transformers are those that textenv is tested with."""

VERSIONS = "import json, importlib.metadata as m, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def trl_python(folder: Path, pip_args: Sequence[str] = ()) -> str:
    """The interpreter of the environment in `folder`, which is made when it is missing (some minutes).

    Raises:
        RuntimeError: it could not be made, or holds other versions.
    """
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pins = [f"{name}=={version}" for name, version in PINNED.items()]
    install = [str(python), "-m", "pip", "--quiet", "--quiet", "install", *pip_args, *pins]
    if not python.exists():
        print(f"Making TRL's environment in {folder}: some minutes, once.", file=sys.stderr)
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
                raise RuntimeError(
                    f"TRL's environment should have been made, but this failed:\n{' '.join(command)}\nRemove {folder} "
                    "and try again, or measure without TRL: --contenders ours-a ours-b ours-c."
                )
    asked = subprocess.run([str(python), "-c", VERSIONS, *PINNED], capture_output=True, text=True)
    found = json.loads(asked.stdout) if asked.returncode == 0 else {"error": asked.stderr.strip().splitlines()[-1]}
    if {name: version.split("+")[0] for name, version in found.items()} != PINNED:
        raise RuntimeError(
            f"{folder} should hold {PINNED}, it holds {found}: another TRL would be measured. Remove the folder, and "
            f"it is made anew; or run\n{' '.join(install)}"
        )
    return str(python)
