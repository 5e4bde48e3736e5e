"""Headrace against the libraries that people train with, as they are installed.

Each test trains a small, randomly initialised model twice: in the library's own loop, and with
Headrace in it or instead of it. Losses and weights must be the same, bit for bit.
"""
