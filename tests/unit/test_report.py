"""report.html tells what run.json and metrics.jsonl say, to the last digit, and nothing that a reader could
be harmed by.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from fmmeta import cli
from fmmeta.report import data as facts_of
from fmmeta.report.charts import extremes, marks_between, smooth
from fmmeta.report.data import read, spikes
from fmmeta.report.page import times, write, write_or_log
from tests.support.fake_runs import BAD, NOT_FINITE, SKIPPED, SPIKE, held_out, metrics, write_run
from tests.support.messages import check_message
from tests.support.report_style import DARK, LIGHT, TEXTS

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The elements of a page: (path of names and ids, attributes, text); fails where they are not closed in
    order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[list] = []
        self.elements: list[list] = []
        self.text = text
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        element = [
            name,
            dict(attributes),
            "",
            [one[1].get("aria-labelledby") for one in self.open if one[0] == "section"],
        ]
        self.elements.append(element)
        if name not in VOID:
            self.open.append(element)

    def handle_startendtag(self, name, attributes):
        self.handle_starttag(name, attributes)
        if name not in VOID:
            self.open.pop()

    def handle_endtag(self, name):
        assert self.open.pop()[0] == name

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, name: str, section: str | None = None) -> list[list]:
        return [one for one in self.elements if one[0] == name and (section is None or section in one[3])]

    def numbers(self, section: str) -> list[tuple[float, str]]:
        """(value for programs, text for people) of a section."""
        return [(json.loads(one[1]["value"]), one[2]) for one in self.all("data", section)]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def page_of(folder) -> Page:
    return Page(write(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("better", "better"),
        ("worse", "worse"),
        ("no significant difference", "same"),
        ("", "same"),
    ],
)
def test_the_colour_follows_the_verdict(run, name, look):
    stored = json.loads((run / "run.json").read_text())
    stored["held_out"] |= {"verdict": {"name": name, "text": "the <verdict>"}, "units": 5, "kind": "class"}
    (run / "run.json").write_text(json.dumps(stored))
    text = write(run).read_text(encoding="utf-8")
    assert f'<p class="verdict {look}">Verdict: the &lt;verdict&gt;.</p>' in text
    assert re.findall(r'<div class="hero (\w+)">', text) == ["a", "b", look]
    assert "over their 5 classes" in text


def test_the_table_is_that_of_run_json(run):
    page, stored = page_of(run), held_out()
    expected = []
    for name in (
        "before adaptation, meta-trained",
        "after adaptation, weights at the start",
        "after adaptation, meta-trained",
        "gain",
    ):
        sign = "+" if name == "gain" else ""
        (accuracy, wide), (loss, far) = stored[name]["accuracy"], stored[name]["loss"]
        expected += [
            (accuracy, f"{100 * accuracy:{sign}.1f}"),
            (wide, f"{100 * wide:.1f}"),
            (loss, f"{loss:{sign}.4f}"),
            (far, f"{far:.4f}"),
        ]
    assert page.numbers("held-out") == expected
    assert "37 held-out 5-way 5-shot episodes" in page.all("caption", "held-out")[0][2]


def test_strata_are_those_of_run_json_and_the_largest_gain_comes_first(run):
    page, stored = page_of(run), held_out()
    order = sorted(
        stored["per_stratum"],
        key=lambda name: stored["per_stratum_at_start"][name] - stored["per_stratum"][name],
    )
    pairs = [(stored["per_stratum_at_start"][name], stored["per_stratum"][name]) for name in order]
    assert page.numbers("strata") == [(value, f"{100 * value:.1f}") for pair in pairs for value in pair]
    assert [one[2] for one in page.all("th", "strata")][4:] == order
    drawn = [one[1]["cx"] for one in page.all("circle", "strata")]
    assert drawn == [f"{100 * value:.2f}%" for pair in pairs for value in pair]


def test_curves_hold_the_numbers_of_metrics(run):
    page, lines = page_of(run), metrics()
    keys = (
        "support_loss",
        "query_loss",
        "accuracy",
        "valid_loss",
        "valid_accuracy",
        "grad_norm",
        "lr",
        "skipped_tasks",
    )
    by_step: dict[int, dict] = {}
    for line in lines:
        by_step.setdefault(line["step"], {}).update(line)
    expected = [line[key] for line in by_step.values() for key in keys if line.get(key) is not None]
    assert [value for value, _ in page.numbers("training")] == expected
    cells = [one[2] for one in page.all("td", "training")]
    assert cells.count("not finite") == 4


def test_curves_go_through_the_points(run):
    """The validation line's path, solved for steps and values again."""
    page, lines = page_of(run), [line for line in metrics() if "valid_loss" in line]
    (path,) = [
        one[1]["d"]
        for one in page.all("path", "training")
        if one[1]["class"] == "curve c" and len(one[1]["d"]) > 10
    ][:1]
    drawn = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    assert [round((x - 45) / (360 - 55) * 100) for x, _ in drawn] == [25, 50, 75, 100]
    heights, losses = [y for _, y in drawn], [line["valid_loss"] for line in lines]
    slopes = [(b - a) / (d - c) for (a, b), (c, d) in zip(pairwise(heights), pairwise(losses), strict=True)]
    assert statistics.pstdev(slopes) < 0.02 * abs(statistics.mean(slopes))
    assert slopes[0] < 0  # down the page is up in y


def test_spikes_and_skipped_and_bad_tasks_are_marked(run):
    page = page_of(run)
    marks = [one for one in page.all("path", "training") if one[1]["class"] == "spike"]
    assert len(marks) == 1
    x = 45 + (360 - 55) * SPIKE / 100
    assert marks[0][1]["d"].startswith(f"M{x:.1f} 21.0l")  # at the upper edge: it does not flatten the rest
    (loss,) = [one[1]["d"] for one in page.all("path", "training") if one[1]["class"] == "curve a faint"][:1]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", loss)]
    assert heights.count(22.0) == 1
    assert max(heights) - min(heights) > 100
    for look, steps in (("d", (SKIPPED, BAD)), ("a", (BAD,))):
        ticks = {one[1]["d"] for one in page.all("path", "training") if one[1]["class"] == f"tick {look}"}
        assert {tuple(re.findall(r"M([\d.]+) ", tick)) for tick in ticks} == {
            tuple(f"{45 + 3.05 * step:.2f}"[:-1] for step in steps)
        }
    text = page.all("p", "training")[0][2]
    assert "1 spike of the query loss" in text
    check_message(text, "2 tasks were left out in 2 outer steps", "1 of them")


def test_a_run_without_problems_reports_none(tmp_path):
    lines = [{**line, "query_loss": 1.5, "skipped_tasks": 0} for line in metrics() if "query_loss" in line]
    for line in lines:
        line.pop("bad_tasks", None)
        line.pop("loss_spike", None)
    text = page_of(write_run(tmp_path / "run", lines)).all("p", "training")[0][2]
    assert "No spikes. No task was left out." in text


def test_spikes_are_those_that_the_run_marked():
    lines = [
        {"step": 1, "query_loss": 1.0},
        {"step": 2, "query_loss": 9.0, "loss_spike": 7.5},
        {"step": 3, "query_loss": 50.0},
    ]
    assert spikes(lines) == [(2, 9.0)]
    assert spikes([{"step": 4, "query_loss": None, "loss_spike": 7.0}]) == []


def test_the_time_of_a_step_adds_up(run):
    found = times(read(run).steps)
    assert found is not None
    assert [found[name] for name in ("steps", "first_left_out", "whole", "data")] == [
        99,
        True,
        pytest.approx(2.0),
        pytest.approx(0.3),
    ]
    for group in range(2):
        assert found["computing"][group] + found["data"] + found["waiting"][group] == pytest.approx(2.0)
    page = page_of(run)
    shown = sorted(value for value, _ in page.numbers("time"))
    assert shown == pytest.approx(sorted([1.65, 0.3, 0.05, 1.6, 0.3, 0.1]))
    widths = [
        float(one[1]["width"].rstrip("%")) for one in page.all("rect", "time") if one[1].get("y") == "15%"
    ]
    assert widths == pytest.approx([82.5, 15, 2.5, 80, 15, 5])


def test_only_first_and_last_of_many_groups_are_shown(tmp_path):
    page = page_of(write_run(tmp_path / "run", metrics(10, groups=60)))
    assert "Shown are 24 of 60 groups" in page.all("p", "time")[0][2]
    names = [one[2] for one in page.all("th", "time") if one[1]["scope"] == "row"]
    assert names == [f"group {group}" for group in (*range(12), *range(48, 60))]


def test_confusion_is_that_of_run_json(run, tmp_path):
    page = page_of(run)
    cells = [one[2] for one in page.all("td", "confusion")]
    assert cells == ["4", "1", "·", "·", "5", "·", "2", "2", "1"]
    assert "10 of 15 query examples right" in page.all("p", "confusion")[0][2]
    stored = json.loads((run / "run.json").read_text())
    stored["held_out"]["confusion"] = {"left_out": "pipeline_stages=2: no answers"}
    (run / "run.json").write_text(json.dumps(stored))
    text = page_of(run).all("p", "confusion")[0][2]
    check_message(text, "No confusion matrix", "pipeline_stages=2")


def test_names_from_data_never_become_markup(tmp_path):
    """Names from data files reach the page; none becomes markup."""
    evil = '<script>alert("x")</script><img src=http://a.test/x onerror=y>&amp;\'"'
    folder = write_run(tmp_path / "run", dataset=[evil], algorithm=evil, model_name_or_path=evil)
    stored = json.loads((folder / "run.json").read_text())
    stored["held_out"]["confusion"] |= {"classes": [evil, "y", "z"], "task": evil, "stratum": evil}
    stored["held_out"]["per_stratum"][evil] = stored["held_out"]["per_stratum_at_start"][evil] = 0.5
    stored["layout"] = stored["versions"][evil] = evil
    (folder / "run.json").write_text(json.dumps(stored))
    page = page_of(folder)
    assert not {"script", "img"} & {one[0] for one in page.elements}
    assert evil in page.all("h1")[0][2]
    assert evil in [one[2] for one in page.all("th", "strata")]
    assert f"1  {evil}" in [one[2] for one in page.all("th", "confusion")]
    assert all(not key.startswith("on") for one in page.elements for key in one[1])


def test_the_page_requests_nothing(run):
    page = page_of(run)
    (policy,) = [
        one[1]["content"] for one in page.all("meta") if one[1].get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'")
    outside = [
        one for one in page.elements for key in ("src", "href", "xlink:href", "action") if one[1].get(key)
    ]
    assert [one[1]["href"] for one in outside] == ["data:,"]
    (sheet,) = page.all("style")
    assert "url(" not in sheet[2]
    assert "@import" not in sheet[2]


def test_the_page_works_with_a_screen_reader(run):
    page = page_of(run)
    ids = [one[1]["id"] for one in page.elements if "id" in one[1]]
    assert len(ids) == len(set(ids))
    named = " ".join(
        one[1]["aria-labelledby"] for one in page.elements if "aria-labelledby" in one[1]
    ).split()
    assert set(named) <= set(ids)
    drawings = [one for one in page.all("svg") if one[1].get("aria-hidden") != "true"]
    assert len(drawings) == 6
    assert all(
        one[1]["role"] == "img" and (one[1].get("aria-labelledby") or one[1].get("aria-label"))
        for one in drawings
    )
    described = [one[2] for one in page.all("desc")]
    assert any("query: 1.6" in text and "1 spikes" in text for text in described)
    assert page.all("html")[0][1]["lang"] == "en"
    assert [one[1]["scope"] for one in page.all("th")].count(None) == 0


def test_secrets_are_not_shown(tmp_path):
    folder = write_run(
        tmp_path / "run",
        dataset=["https://me:pa55word@host.test/data?token=abc123"],
        model_name_or_path="hf_abcdefghijklmnopqrstuv",
    )
    text = write(folder).read_text()
    for secret in ("pa55word", "abc123", "abcdefghijklmnopqrstuv"):
        assert secret not in text
    assert "host.test" in text


@pytest.mark.parametrize("lines", [None, []])
def test_a_report_of_an_unfinished_run(tmp_path, lines):
    folder = write_run(tmp_path / "run", metrics(40) if lines is None else lines, finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "query_lo')  # as another process finds it
    page = page_of(folder)
    state = page.all("span")[0][2]
    check_message(state, "of 100", f"outer step {0 if lines == [] else 40}")
    assert page.all("table", "held-out") == []
    if lines == []:
        assert "No outer step is logged." in page.text


def test_a_report_of_ten_thousand_steps_is_small(tmp_path):
    folder = write_run(tmp_path / "run", metrics(10_000))
    began = time.process_time()
    file = write(folder)
    assert time.process_time() - began < 3
    assert file.stat().st_size < 700_000
    page = Page(file.read_text())
    assert "(200 of 10000 steps;" in page.all("summary", "training")[0][2]
    assert len([one for one in page.all("path", "training") if one[1]["class"] == "spike"]) == 1


def test_a_long_line_keeps_its_peaks_and_gaps():
    points = [(step, float(step % 7)) for step in range(5000)]
    points[1234], points[4000] = (1234, 99.0), (4000, None)
    kept = extremes(points, 300)
    assert len(kept) <= 301
    assert (1234, 99.0) in kept
    assert (4000, None) in kept
    assert [step for step, _ in kept if step not in (4000,)] == sorted(
        step for step, _ in kept if step not in (4000,)
    )
    assert smooth([(0, 1.0), (1, None), (2, 3.0), (3, 5.0)], 2) == [(0, 1.0), (2, 2.0), (3, 4.0)]


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 150, [0, 50, 100, 150]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.38, 1.62, [1.4, 1.45, 1.5, 1.55, 1.6]),
    ],
)
def test_axis_ticks_are_round_numbers(low, high, marks):
    assert marks_between(low, high, 5) == pytest.approx(marks)


@pytest.mark.parametrize(
    ("steps", "marks"),
    [(1, ["0", "1"]), (2, ["0", "1", "2"]), (7, ["0", "2", "4", "6"]), (12, ["0", "5", "10"])],
)
def test_steps_on_the_axis_are_whole_and_different(tmp_path, steps, marks):
    page = page_of(write_run(tmp_path, metrics(steps), outer_steps=steps))
    charts = page.text.split("<svg ")[1:]
    labels = [re.findall(r'<text x="[^"]*" y="[^"]*" class="middle">([\d,]+)</text>', one) for one in charts]
    labels = [one for one in labels if one]
    assert labels == [marks] * len(labels) != []


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_contrast_meets_wcag(colours):
    for ink, on in TEXTS:
        light, dark = sorted((luminance(colours[ink]), luminance(colours[on])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, on)
    assert LIGHT.keys() == DARK.keys()
    assert len(LIGHT) == 24


def test_the_report_command(run, capsys, tmp_path):
    def ended(*words) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["report", *words])
        stored = capsys.readouterr()
        return end.value.code, (stored.out + stored.err).strip()

    assert ended("--output_dir", str(run)) == (0, f"fmmeta: report {run / 'report.html'}")
    assert Page((run / "report.html").read_text()).all("h1")[0][2] == "fomaml on letters"
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    code, message = ended("--output_dir", str(run))
    assert code == 2
    check_message(message, f"output_dir={run}: report.html", "copy the run to a folder")
    none, strange = tmp_path / "none", tmp_path / "strange"
    strange.mkdir()
    (strange / "run.json").write_text('{"settings": {}}')
    (run / "run.json").write_text("{")
    for words, parts in (
        (["--output_dir", str(none)], [f"output_dir={none}", "run.json", "give the folder of a run"]),
        (["--output_dir", str(strange)], [f"output_dir={strange}", "is not of fmmeta train", "restore"]),
        ([], ["output_dir is not given", "name the folder of a run"]),
        (["--output_dri", "x"], ["--output_dri", "did you mean --output_dir?", "--help lists them"]),
        (["--output_dir", str(run)], [f"{run / 'run.json'}", "correct or remove it"]),
    ):
        code, message = ended(*words)
        assert code == 2
        assert message.startswith("fmmeta: error: ")
        check_message(message, *parts)


def test_a_report_that_fails_ends_no_run(run, monkeypatch):
    text = []
    monkeypatch.setattr(facts_of.Facts, "outer_step", property(lambda self: 1 / 0))
    write_or_log(run, text.append)
    assert len(text) == 1
    check_message(text[0], f"{run / 'report.html'}", "ZeroDivisionError", "the run is not affected")


def test_data_of_a_run_folder(run):
    found = read(run)
    assert (len(found.steps), len(found.valid), found.outer_step) == (100, 4, 100)
    (line,) = [line for line in found.steps if line["step"] == NOT_FINITE]
    assert facts_of.points([line], "query_loss") == [(NOT_FINITE, None)]
