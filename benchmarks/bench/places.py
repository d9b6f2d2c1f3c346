"""Where things are."""

from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "results"
ENVIRONMENTS = HERE / ".envs"
"""The peers' environments and everything else that can be made again."""
LOGS = ENVIRONMENTS / "logs"
TABLE = HERE / "RESULTS.md"
