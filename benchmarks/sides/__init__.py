"""The processes that `benchmarks.harness.Side` starts: each loads one thing, then measures it whenever it is told."""
