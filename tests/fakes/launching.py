"""The programs as a person starts them: from any directory, without installing anything."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(script: str, *arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess:
    """Runs `launch/<script>.py` to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, ROOT / "launch" / f"{script}.py", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def lines_of_mistake(result: subprocess.CompletedProcess) -> list[str]:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    return result.stderr.splitlines()
