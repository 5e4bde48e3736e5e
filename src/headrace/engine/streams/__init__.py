"""The streams of a plan, and how far the host may run ahead of the device on them."""
