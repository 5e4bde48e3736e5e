"""Works: what bench and tune train. `work` defines one, `builtin` has ours, `lookup` finds one."""
