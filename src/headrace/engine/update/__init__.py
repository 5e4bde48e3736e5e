"""From gradients to changed weights: the group, clipping, update, averages and schedulers."""
