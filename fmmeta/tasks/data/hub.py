"""Rows of data sets of the hub and of `datasets`, and the names of classes that `datasets` stores.

A `ClassLabel` holds numbers of classes. Their names are in the features of a data set, in the metadata of a
parquet file, and in the data set card of a folder.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError, one_line, usage_errors
from fmmeta.tasks.data.columns import Row

BATCH = 1024  # rows that are in memory as columns
ClassNames = Mapping[str, Sequence[str]]
"""Names of the classes whose numbers a column holds, by column."""


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """Those of the columns that are a `datasets.ClassLabel`, or a list of them."""
    import datasets

    kinds = {name: getattr(one, "feature", one) for name, one in features.items()}
    return {
        name: one.names for name, one in kinds.items() if isinstance(one, datasets.ClassLabel) and one.names
    }


def schema_names(path: Path, schema: Any) -> ClassNames:
    """Those in the metadata that `datasets` writes into a parquet file. Raises `UsageError`."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    import datasets

    with usage_errors(f"{path} has metadata of datasets that cannot be read", "write the file again"):
        return class_names(datasets.Features.from_arrow_schema(schema))


def cards_of(folder: Path) -> list[Path]:
    """The files of a folder's data set card that name classes."""
    cards = [folder / name for name in ("README.md", "dataset_infos.json")]
    naming = re.compile(rb'(?s)dataset_info:.*class_label:|"ClassLabel"')
    return [card for card in cards if card.is_file() and naming.search(card.read_bytes())]


def card_names(folder: Path) -> ClassNames:
    """Those in the data set card of a folder, as `datasets` reads it for a hub id. Raises `UsageError`.

    Columns that its configurations name differently are refused: local files do not say which one they are.
    """
    if not cards_of(folder):
        return {}
    from datasets.info import DatasetInfosDict

    found = dict[str, Sequence[str]]()
    with usage_errors(f"{folder} has a data set card that cannot be read", "fix it"):
        infos = DatasetInfosDict.from_directory(str(folder))
    for info in infos.values():
        names = class_names(info.features or {})
        if twice := [column for column, one in names.items() if found.get(column, one) != one]:
            raise UsageError(
                f"{folder} has a data set card whose configurations name the classes of {twice[0]}"
                " differently; keep the one of these files"
            )
        found |= names
    return found


def named(row: Row, names: ClassNames, of_csv: bool = False) -> Row:
    """The row with names in place of the numbers of classes; None for what is no class, as -1 is in rows
    without a label. of_csv: digits are numbers, also where a class is called so.
    """
    for column in names.keys() & row.values.keys():
        classes, value = names[column], row.values[column]
        several = isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", 0))
        each = [name_of(one, classes, of_csv) for one in (value if several else [value])]
        row.values[column] = each if several else each[0]
    return row


def name_of(value: Any, classes: Sequence[str], of_csv: bool) -> str | None:
    """The name of a class; see `named`."""
    if isinstance(value, str) and value.strip().isdecimal() and (of_csv or value not in classes):
        value = int(value)
    if isinstance(value, (int, float)):
        is_class = 0 <= value < len(classes) and value % 1 == 0
        value = classes[int(value)] if is_class else None
    return next((one for one in (value, str(value).strip()) if one in classes), None)


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached, tried once per process: the hub's client tries six times for every
    file, which takes minutes without a network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    for wait_s in (1.0, 2.0, 0.0):  # a connection may fail for a moment
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return True
        except Exception:  # each HTTP client has other exceptions for it
            time.sleep(wait_s)
    return False


def open_hub(dataset: str, config_name: str | None, split: str = "train", revision: str | None = None) -> Any:
    """A split of a hub data set (of its cached copy if the hub cannot be reached); rows are read later.

    Raises `UsageError`, which tells an unreachable hub from a wrong name.
    """
    import datasets
    import datasets.config
    from huggingface_hub.constants import ENDPOINT

    asked_offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not hub_answers()
    try:  # the client would try six times for every file
        return datasets.load_dataset(dataset, config_name, split=split, revision=revision)
    except Exception as error:  # the hub raises many types
        why = one_line(error)
        if "Unknown split" in why:
            raise UsageError(
                f"dataset_split={split} is no split of dataset={dataset} ({why}); give one of these, several"
                " as a+b, or all"
            ) from None
        at = f" and dataset_revision={revision}" if revision else ""
        text = f"is neither a path nor a readable hub data set ({why}); check the name{at}"
        if not hub_answers():
            text = (
                f"is no path, not in the cache ({why}), and the hub at {ENDPOINT} cannot be reached; check"
                " the network and HF_HUB_OFFLINE, or give a file"
            )
        raise UsageError(f"dataset={dataset} {text}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = asked_offline


def hub_rows(where: str, part: Any) -> Iterator[Row]:
    """Rows of a split, as they are read; class ids become names, and images (audio, video) stay encoded."""
    part = part.with_format(None)
    for column, feature in part.features.items():
        if getattr(feature, "decode", False):
            part = part.cast_column(column, replace(feature, decode=False))
    names = class_names(part.features)
    rows = (
        zip(batch, values, strict=True)
        for batch in part.iter(BATCH)
        for values in zip(*batch.values(), strict=True)
    )
    for number, values in enumerate(rows, 1):
        yield named(Row(dict(values), f"{where}:{number}"), names)


def split_rows(where: str, data: Any, wanted: str) -> Iterator[Row]:
    """Rows of a `datasets.Dataset`, or of the wanted splits of a `DatasetDict`. Raises `UsageError`."""
    splits = dict(data) if hasattr(data, "keys") else {"rows": data}
    names = list(splits) if wanted == "all" or "rows" in splits else wanted.split("+")
    if missing := [name for name in names if name not in splits]:
        raise UsageError(
            f"dataset_split={wanted}: {where} has no split {missing[0]!r}; use"
            f" {', '.join(map(str, splits))}, several as a+b, or all"
        )
    for name in names:
        yield from hub_rows(f"{where}[{name}]", splits[name])
