# An owner of a cluster, without a main guard and also run through `python -c`: it starts a cluster, says so, and then
# does what it was told to do to itself.
from __future__ import annotations

import json
import os
import sys

from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.launch.local import LocalCluster

deed = sys.argv[1]
LISTENING = "tests.cluster.listening_engine"
cluster = LocalCluster(engine_module="tests.cluster.late_engine" if deed == "interrupted" else LISTENING)


def start() -> None:
    engines = cluster.start(
        2, name="owned", secret=random_secret(), deadline_s=30, progress=lambda what: print(what, flush=True)
    )
    print(json.dumps({"folder": str(cluster.folder), "engines": [engine.pid for engine in engines]}), flush=True)


if deed == "interrupted":
    try:
        start()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin.readline()
    cluster._engine_module = LISTENING
    start()
    cluster.stop()
    print("stopped", flush=True)
    sys.exit()

start()
if deed == "forks":
    child = os.fork()  # holds a copy of every pipe for as long as it lives
    if child == 0:
        os.read(0, 1)
        os._exit(0)
    print(child, flush=True)
order = sys.stdin.readline()
if order == "os._exit\n":
    os._exit(3)
if order == "raise\n":
    raise RuntimeError("a bug of the user's")
