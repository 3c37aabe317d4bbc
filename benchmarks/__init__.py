"""Measurements against peers: `python -m benchmarks NAME [--json]`."""
