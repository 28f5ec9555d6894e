"""Does an environment keep the rules of text environments? `check_text_env` says so, and what it could not reach.

For authors of environments and wrappers: put ``check_text_env("my/Env-v0")`` into a test.
"""

from textenv.testing.checking import check_text_env
from textenv.testing.report import ConformanceError, Report, Violation
from textenv.testing.rules import CHECKS

__all__ = ["CHECKS", "ConformanceError", "Report", "Violation", "check_text_env"]
