"""Where training is, stored and restored."""
