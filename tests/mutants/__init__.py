"""Planted defects that the fast tests must find: `make mutants`, or `python -m tests.mutants.run --help`."""
