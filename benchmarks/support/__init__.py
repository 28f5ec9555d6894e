"""What the benchmarks share: measured processes, ceilings, counted arithmetic, and the sides that are compared."""
