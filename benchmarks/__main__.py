"""`python -m benchmarks NAME [--json | --markdown] [--quick]`: see docs/benchmarks.md for what each name measures."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from benchmarks.harness import environment

NAMES = ("single", "start", "latency", "memory", "links", "collectives", "flood", "serving", "layouts", "disaggregated")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure against peers and goals.")
    parser.add_argument("name", choices=(*NAMES, "soak", "serving-soak", "all"), nargs="+")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="length of a soak (default 10)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--markdown", action="store_true", help="tables as docs/benchmarks.md has them")
    parser.add_argument("--quick", action="store_true", help="smaller inputs: to see that it runs, not to quote")
    arguments = parser.parse_args()
    names = NAMES if "all" in arguments.name else arguments.name
    report = {"environment": environment(), "quick": arguments.quick}
    for name in names:
        result = importlib.import_module(f"benchmarks.{name.replace('-', '_')}").run(arguments)
        report[name] = result
        if arguments.markdown:
            print("\n".join(table(name, result)), flush=True)
        elif not arguments.json:
            show(name, result)
    if arguments.json:
        print(json.dumps(report))
    else:
        print("\n" + ", ".join(f"{key} {value}" for key, value in environment().items()))
    return 1 if any(report[name].get("failed") for name in names) else 0


def show(name: str, result: dict[str, Any]) -> None:
    """One benchmark's result as lines of text."""
    print(f"\n{name}: {result['what']}")
    for key, value in result.items():
        if key not in {"what", "figures"}:
            print(f"  {key.replace('_', ' ')}: {value}")
    for row in result["figures"]:
        cells = (f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items())
        print("  " + "  ".join(cells))


def table(name: str, result: dict[str, Any]) -> list[str]:
    """The same as lines of Markdown."""
    rows = result["figures"]
    head = list(rows[0])
    return [
        f"### `python -m benchmarks {name}`",
        "",
        f"{result['what'][0].upper()}{result['what'][1:]}.",
        "",
        "| " + " | ".join(key.replace("_", " ") for key in head) + " |",
        "|" + "---|" * len(head),
        *(
            "| "
            + " | ".join(f"{row[key]:.3g}" if isinstance(row[key], float) else f"{row[key]}" for key in head)
            + " |"
            for row in rows
        ),
        "",
        *(f"* {key.replace('_', ' ')}: {value}" for key, value in result.items() if key not in {"what", "figures"}),
        "",
    ]


sys.exit(main())
