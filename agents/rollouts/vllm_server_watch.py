"""Runs a command as long as its own standard input stays open, so that no server outlives the run that started it.

A script of its own, with nothing but the standard library: ``python -I vllm_server_watch.py SECONDS COMMAND...``. When
the input ends, because the other side closed it or died, the command gets SIGTERM, and after SECONDS its whole process
group SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """The command's exit status."""
    patience, command = float(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch() -> None:
        while os.read(0, 4096):  # not through sys.stdin, whose lock would abort the interpreter's exit
            pass
        child.terminate()
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
