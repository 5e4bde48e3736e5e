"""Steps that run as graphs: which rung a step is on, and its capture and replay."""
