"""`python -m mlxcel_nb` is `mlxcel-nb`."""

from __future__ import annotations

import sys

from mlxcel_nb.cli import main

sys.exit(main())
