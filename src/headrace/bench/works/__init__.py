"""Works: what is trained. `work` says what one is, `builtin` has ours, `lookup` finds one."""
