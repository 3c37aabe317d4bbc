"""A listening engine whose ipyparallel and ipykernel log all they can."""

from __future__ import annotations

import sys

from mlxcel_nb.launch import engine
from tests.cluster.listening_engine import listen

if __name__ == "__main__":
    sys.exit(engine.main(sys.argv[1:], start_node=listen, log_level="DEBUG"))
