"""What several test modules share, one subject a module.

A helper that only one test module uses stays in it. Test modules import from here, and never from
each other or from a conftest. Functions that another process runs are here, too, because a child
process can import `support` but not a test module.
"""
