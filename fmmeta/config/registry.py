"""Specs by name: those of this package, `module:spec`, or an entry point of an installed package."""

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_named
from fmmeta.common.text import nearest


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Entry points of installed packages, by name."""
    return {one.name: one for one in entry_points(group=group)}


resolved = cache(pkgutil.resolve_name)


def find_spec(
    setting: str,
    name: str,
    built_in: Mapping[str, Any],
    plug_ins: str,
    kind: type,
    example: str,
    spec_of: Callable[[Any], Any] = lambda found: found,
) -> Any:
    """The spec that a setting names. built_in: name -> module:spec, which come first; names that the caller
    looks up may have any value.

    plug_ins: a group of entry points, "" for none. kind: the class of the spec. example: a file that has one.
    spec_of: makes a spec of what is imported, or returns it. Raises `UsageError` in one line.
    """
    group = installed(plug_ins)
    if name in built_in:
        return resolved(built_in[name])
    if ":" in name:
        found = import_named(setting, name, kind.__name__)
    elif name in group:
        with usage_errors(
            f"{setting}={name} cannot be imported from {group[name].value}",
            "correct or remove the package that installs it",
        ):
            found = group[name].load()
    else:
        names = dict.fromkeys((*built_in, *group))
        raise UsageError(
            f"{setting}={name} is unknown{nearest(name, names)}; use {', '.join(names)}, or module:spec of"
            " another"
        )
    found = spec_of(found)
    if not isinstance(found, kind):
        raise UsageError(
            f"{setting}={name} is a {type(found).__name__} and no {kind.__name__}; name one ({example})"
        )
    return found
