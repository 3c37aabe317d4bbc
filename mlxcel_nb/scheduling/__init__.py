"""Which sequence runs next, and in whose company: the pure scheduler of a loaded model."""
