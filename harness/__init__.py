"""What tests and benchmarks share: processes that start fast, several hosts, elastic groups that die."""
