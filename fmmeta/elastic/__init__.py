"""Elastic runs: groups that join and leave (lighthouse, membership, communicator, starter)."""
