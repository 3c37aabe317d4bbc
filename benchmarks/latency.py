"""From a token leaving the engine's MLX thread to its text in the cell, as a front end of the notebook receives it.

A real kernel runs the real magics. An engine's answer is paced by `benchmarks.sides.pacer`; the front end is a
Jupyter client in this process, which notes when each piece of the cell's text arrives.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from typing import Any

from benchmarks.harness import REPO, percentile

MODEL = "smollm2-135m"
SECONDS = 10
PER_S = 30
PACES = {
    "30 tokens a second": [1 / PER_S] * (SECONDS * PER_S),
    "bursts of 30, one a second": ([1.0] + [0.0] * (PER_S - 1)) * SECONDS,
}
SETUP_S = 120.0

PREPARE = f"""
import json
from mlxcel_nb.commands.session import current
def on_engine(code):
    return current().get().cluster.client[0].execute(code, block=True)
on_engine("import sys; sys.path.insert(0, {str(REPO)!r}); from benchmarks.sides import pacer; pacer.install()")
"""


def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """p50 and p99 in milliseconds for each pace."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for cell in ("%load_ext mlxcel_nb", "%mlxcel cluster start -n 1", f"%mlxcel load {MODEL}", PREPARE):
            execute(client, cell)
        figures = [measure(client, name, gaps) for name, gaps in PACES.items()]
        execute(client, "%mlxcel cluster stop")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    return {
        "what": "engine's token to the cell's text, milliseconds",
        "goal": "p99 under 50 at 30 tokens a second, under 100 in bursts",
        "figures": figures,
    }


def measure(client: Any, name: str, gaps: list[float]) -> dict[str, Any]:
    """One answer at one pace."""
    execute(client, f'on_engine("pacer.plan({gaps!r})")')
    arrived: dict[int, float] = {}
    for moment, text in execute(client, "%%mlxcel generate --max-tokens 1\nHello"):
        for number in re.findall(r"#(\d+) ", text):
            arrived.setdefault(int(number), moment)
    out = execute(client, 'print(json.dumps(current().get().cluster.client[0]["pacer.sent()"]))')
    sent: list[float] = json.loads("".join(text for _, text in out))
    assert sorted(arrived) == list(range(len(gaps))) and len(sent) == len(gaps), "a piece of text is missing"
    late = [(arrived[number] - moment) * 1000 for number, moment in enumerate(sent)]
    return {
        "figure": name,
        "pieces": len(late),
        "p50_ms": percentile(late, 0.5),
        "p99_ms": percentile(late, 0.99),
        "max_ms": max(late),
    }


def execute(client: Any, code: str) -> list[tuple[float, str]]:
    """Run a cell to its end; what it wrote to standard output, piece by piece, with the moment each came."""
    request = client.execute(code)
    pieces: list[tuple[float, str]] = []
    deadline = time.monotonic() + SETUP_S
    while True:
        message = client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
        now = time.monotonic()
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            pieces.append((now, content["text"]))
        elif message["msg_type"] == "error":
            raise RuntimeError(f"{code.splitlines()[0]}: {content['ename']}: {content['evalue']}")
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return pieces
