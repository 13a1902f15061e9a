"""Every worker does the same arithmetic: each operation of each worker against the plain worker."""
