"""What a graph depends on besides its arguments, compared before each replay.

`guards` for a whole function, `module_guards` for a model's call; `obstacles` says what no graph
could repeat, as far as that is known before anything runs.
"""
