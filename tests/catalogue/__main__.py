"""Runs every test that goes over the catalogue, for all of it or for the entries named.

python -m tests.catalogue                  # all
python -m tests.catalogue qwen3_next mamba # these
python -m tests.catalogue -- -n 2 -x       # what follows is pytest's
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.catalogue import WANTED

TESTS = sorted(str(path) for path in Path(__file__).parents[1].rglob("test_every_*.py"))
"""By their names, so that one that is added is run."""


def main() -> int:
    names, _, rest = " ".join(sys.argv[1:]).partition("--")
    environment = {**os.environ, WANTED: ",".join(names.split()) or "all"}
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS, *rest.split()], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
