"""Chooses the stages of a pass by the plan and the options of an engine, and puts them together."""
