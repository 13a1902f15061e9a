"""Exceptions that end a command with one line; the command line maps each to an exit code."""

from __future__ import annotations


class UsageError(ValueError):
    """A setting or an input cannot work (exit code 2).

    The text is one line: the value, what is wrong, what to do.
    """


class MachineFault(RuntimeError):
    """A machine or the network misbehaves (exit code 70).

    The text is one line; the last checkpoint is intact.
    """


class PeerLost(RuntimeError):
    """A group has died or cannot be reached (--elastic): the sum that it took part in is void."""


class Stopped(Exception):
    """The command was stopped by a signal (exit code 75); what was learned is saved."""
