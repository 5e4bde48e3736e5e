"""What a captured function uses: modules, optimizers, gradients, and the memory that they are in.

`state` names them, `memory` says whether they have moved and puts them back after a capture,
`capturable_optimizer` and `learning_rates` have a graph read from the device what changes.
"""
