"""The page of what works agrees with the code."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from fmmeta.cli import parse
from fmmeta.config.algorithms import BUILT_IN
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe
from fmmeta.learners.stages import family_of
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.tensor_parallel import plan_of
from tests.support.launch import ROOT
from tests.support.messages import refusal

PAGE = ROOT / "docs" / "reference" / "what-works.md"


def supported() -> dict:
    source: dict = {"__name__": "table"}
    exec((ROOT / "docs" / "supported_models.py").read_text(), source)
    return source


def listed(heading: str) -> list[str]:
    """The first cells of the table under a heading of the page."""
    section = PAGE.read_text().split(f"## Refused {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)[1 if heading == "models" else 0 :]


@pytest.mark.parametrize(("file", "most"), [("docs/reference/what-works.md", 30), ("README.md", 8)])
def test_a_table_of_supported_models_is_that_of_the_code(file, most):
    text, content = (ROOT / file).read_text(), supported()["pages"]()[file]
    assert supported()["page"](text, content) == text, "run: python docs/supported_models.py"
    assert len(content.splitlines()) - 2 <= most


def test_the_table_of_what_goes_together_is_that_of_the_code():
    source: dict = {"__name__": "table", "__file__": str(ROOT / "docs" / "compatibility.py")}
    exec((ROOT / "docs" / "compatibility.py").read_text(), source)
    text = PAGE.read_text()
    assert source["page"](text) == text, "run: python docs/compatibility.py"
    assert all((ROOT / file).is_file() for file in source["ELSEWHERE"].values())
    assert set(source["ALGORITHMS"]) == set(BUILT_IN)


@pytest.mark.parametrize("row", supported()["rows"](), ids=lambda row: row[0])
def test_a_family_is_split_or_refused_as_the_table_says(row):
    name, pipeline, tensor = row[0].strip("`"), row[3], row[4]
    known = row[0].startswith("`")
    hf_config = AutoConfig.for_model(name) if known else SimpleNamespace(model_type="other")
    for works, split in (
        (pipeline, lambda: family_of(hf_config)),
        (tensor, lambda: plan_of(hf_config, 2)),
    ):
        if works == "yes":
            assert split()
        else:
            assert "ZeRO 3" in refusal(split)


@pytest.mark.parametrize("flags", listed("settings"))
def test_combinations_in_the_limitations_are_refused(flags):
    assert "; " in refusal(parse, shlex.split(flags))


@pytest.mark.parametrize("content", listed("DeepSpeed files"))
def test_deepspeed_files_in_the_limitations_are_refused(content, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(content)
    assert f"deepspeed={file.name} sets " in refusal(deepspeed_config.read, str(file), False, print)


@pytest.mark.parametrize("content", listed("models"))
def test_models_in_the_limitations_are_refused(content, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(content)))
    assert "; " in refusal(describe, Config(model_name_or_path=str(tmp_path)))


def test_the_limitations_list_refusals_of_each_kind():
    counts = [len(listed(heading)) for heading in ("settings", "DeepSpeed files", "models")]
    assert counts == [11, 8, 3]
