"""What is imported when: torch takes a second or two, and nobody should wait for it who doesn't need it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dynafed


@pytest.mark.parametrize(
    "code",
    [
        "import dynafed; dynafed.UserError",
        "import dynafed.cli",
        "import dynafed.cli; dynafed.cli.main(['--help'])",
        "import dynafed.cli; dynafed.cli.main(['run', '--help'])",
        "import dynafed; dynafed.Callback; dynafed.Config; import dynafed.callbacks",
        "import dynafed.cli; dynafed.cli.main(['presets'])",
        "import dynafed.cli; dynafed.cli.main(['--version'])",
    ],
)
def test_torch_and_flower_are_not_imported(code: str) -> None:
    found = "print({'torch', 'flwr', 'numpy'} & sys.modules.keys(), file=sys.stderr)"
    watch = f"import sys, atexit; atexit.register(lambda: {found}); {code}"
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


def test_every_public_name_is_there() -> None:
    for name in dynafed.__all__:
        assert getattr(dynafed, name) is not None
    assert set(dynafed.__all__) <= set(dir(dynafed))
    assert dynafed.data.NAMES
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dynafed.nothing  # noqa: B018
