"""Workloads for bench and tune. `work` defines one, `builtin` has ours, `lookup` finds one."""
