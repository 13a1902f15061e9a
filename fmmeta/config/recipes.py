"""Recipes: files of settings, which flags override.

    fmmeta train intents --dataset my-intents      the packaged recipe fmmeta/recipes/intents.yaml
    fmmeta train RUN/config.yaml --output_dir NEW  a file; --config RUN/config.yaml is the same

Values are read as the text that a flag has: `class_split: 01` is "01", and `inner_lr_learned: no` is "no".
"""

import json
import math
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, as_stored, nearest, shortened
from fmmeta.config.fields import KINDS, default_of, is_open, kind_of, refuse_first, shown
from fmmeta.config.settings import GROUPS, REMEMBERED, names_of

FOLDER = Path(__file__).parents[1] / "recipes"
LARGEST_FILE = 2**20  # bytes of a recipe


def names() -> list[str]:
    """The packaged recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def text_of(config: Any, without: Container[str]) -> str:
    """A recipe of the settings that differ from their defaults, by group.

    Settings that were left open and resolved are not among them. without: names that are left out.
    """
    import yaml

    default = {item.name: default_of(item) for item in fields(config)}
    values = {name: value for name, value in config.as_dict().items() if value != default[name]}
    for name in [name for name in values if default[name] is None]:
        others = {key: value for key, value in values.items() if key != name}
        with suppress(UsageError):
            if type(config)(**others) == config:
                values = others
    parts = []
    for group in GROUPS:
        named = [name for name in names_of(group) if name in values and name not in without]
        if part := {name: as_stored(values[name]) for name in named}:
            text = yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=1000)
            parts.append(f"\n# {group}\n{text}")
    return "".join(parts) or "{}\n"


def choose(config: str | None, words: list[str]) -> tuple[str, str] | None:
    """What names the recipe (`config` or `recipe`) and its name or file; None without one.

    config: the value of --config. words: what a parser of the flags left over; a first word that is no flag
    names the recipe and is removed. Raises `UsageError` for two recipes.
    """
    given = [("config", config)] if config is not None else []
    while words and not words[0].startswith("-"):
        given.append(("recipe", words.pop(0)))
    if len(given) > 1:
        (kind, first), (_, second) = given[:2]
        raise UsageError(f"{kind}={first} and recipe={second} are two recipes; give one")
    return given[0] if given else None


def is_recipe(word: str) -> bool:
    """Whether a word before names of data is a recipe: a packaged one, or a YAML file."""
    return word in names() or Path(word).suffix in (".yaml", ".yml")


def find(what: str, name: str) -> Path:
    """The file of a recipe; a packaged name comes before a file of that name. Raises `UsageError`."""
    packaged, path = names(), Path(name)
    if name in packaged:
        return FOLDER / f"{name}.yaml"
    if path.is_file():
        return path
    raise UsageError(
        f"{what}={name} is neither a file nor a recipe{nearest(name, packaged)}; give a YAML or JSON file of"
        f" settings, or {any_of(packaged)}"
    )


def read(what: str, name: str, settings: Any) -> dict[str, Any]:
    """The values of a recipe, converted as flags are.

    what: `recipe` or `config`, for messages. settings: the dataclass of the command. null means the default.
    Raises `UsageError`.
    """
    where = f"{what}={name}"
    values = mapping(where, find(what, name))
    if "tuned" in values:
        values = chosen(values, settings, where)
    check_names(values, settings, where)
    return {
        name: json.dumps(value)
        if name == "tune" and isinstance(value, dict)
        else typed(settings, name, value, where)
        for name, value in values.items()
        if value is not None
    }


def chosen(values: Mapping[str, Any], settings: Any, where: str) -> dict[str, Any]:
    """The settings in a file of `fmmeta tune --output`; the rest of it are facts about model and data.

    Raises `UsageError` for learned rates, which flags would replace.
    """
    rates = values.get("inner_rates")
    if rates is not None and not all_are(rates, values.get("inner_lr")):
        raise UsageError(
            f"{where} holds learned inner rates, which no flag gives; copy it into the folder of the model as"
            " fmmeta.json"
        )
    kept = [name for name in (*REMEMBERED, "pooling", "method") if name in settings.__dataclass_fields__]
    return {name: values[name] for name in kept if name in values}


def all_are(rates: Any, inner_lr: Any) -> bool:
    """Whether all inner rates of a file, by layer and step, are `inner_lr`, as without learned ones."""
    with suppress(TypeError, ValueError, AttributeError):
        return all(math.isclose(float(rate), float(inner_lr)) for column in rates.values() for rate in column)
    return False


def mapping(where: str, path: Path) -> dict[str, Any]:
    """The content of a YAML or JSON file; values are text, lists, mappings or None. Raises `UsageError`."""
    import yaml

    class AsText(yaml.SafeLoader):
        """Reads every scalar but null as the text that is written; refuses tags and repeated names."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            values, seen = super().construct_mapping(node, deep), set[Any]()
            for key, _ in node.value:
                name = self.construct_object(key)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{name} is set twice", problem_mark=key.start_mark
                    )
                seen.add(name)
            return values

    null = "tag:yaml.org,2002:null"
    kept = (null, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")), None)
    AsText.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in kept}
    AsText.yaml_implicit_resolvers = {
        first: [rule for rule in found if rule[0] == null]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    try:
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise UsageError(
                f"{where} has {size} bytes, and a file of settings has at most {LARGEST_FILE}; give another"
            )
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":  # YAML reads most of JSON, but no tabs, and no escapes of surrogate pairs
            with suppress(ValueError):
                text = json.dumps(json.loads(text), ensure_ascii=False)
        values = yaml.load(text, AsText)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where} cannot be read: {error.problem}{line}; fix the file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise UsageError(f"{where} cannot be read: {' '.join(str(error).split())}; fix the file") from None
    if not isinstance(values, dict):
        raise UsageError(f"{where} holds no settings; write `name: value` lines")
    return values


def check_names(values: Mapping[str, Any], settings: Any, where: str) -> None:
    """Raise `UsageError` for a name that is no setting of the dataclass `settings`."""
    known = settings.__dataclass_fields__
    for name in values:
        if name not in known:
            close = nearest(str(name), known, "; remove it")
            raise UsageError(f"{where} sets {name}, which is no setting{close}")


def typed(settings: Any, name: str, value: Any, where: str) -> Any:
    """A text, or a list of them, as values of the type of a setting. Raises `UsageError`."""
    if is_open(settings, name, value):
        return None
    kind, is_list = kind_of(settings, name)
    values = value if isinstance(value, list) else [value]
    text = shortened(value).replace("'", "")  # lists without quotes, as in YAML
    nested = any(isinstance(one, (list, dict)) for one in values)
    refuse_first(
        [
            (
                isinstance(value, dict) or (isinstance(value, list) and not is_list),
                f"{where} sets {name}={text}, which is not one value; write `{name}: value`",
            ),
            (nested, f"{where} sets {name}={text}, which is nested; write one list of values"),
        ]
    )
    convert = (lambda text: TRUTH[text.lower()]) if kind is bool else kind
    try:
        converted = [convert(str(one)) for one in values]
    except (ValueError, KeyError):
        raise UsageError(
            f"{where} sets {name}={shown(value)}, which is not {KINDS[kind][0]}; give one"
        ) from None
    return converted if is_list else converted[0]


TRUTH = {  # as of flags
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}
