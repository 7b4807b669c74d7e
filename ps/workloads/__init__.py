"""The built-in workloads; `catalogue` finds one by its name."""
