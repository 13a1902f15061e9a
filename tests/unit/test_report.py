"""report.html tells what run.json and metrics.jsonl say, to the last digit, and nothing that a reader could
be harmed by.
"""

import json
import re
import time
from html.parser import HTMLParser

import pytest

from fmmeta import cli
from fmmeta.report.page import Facts, chart, marks, means, write, write_or_log
from tests.support.fake_runs import held_out, metrics, write_run
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

    def handle_endtag(self, name):
        if name not in VOID:
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


def test_own_metrics_have_a_table_a_column_and_a_chart(tmp_path):
    """Of a kind of task without an accuracy, as regression."""
    lines = [{key: line[key] for key in line if "accuracy" not in key} for line in metrics()]
    lines = [line | {"valid_r2": line["step"] / 1000} if "valid_loss" in line else line for line in lines]
    run = write_run(tmp_path, lines=lines)
    stored = json.loads((run / "run.json").read_text())
    stored["held_out"]["metrics"] = {"r<2": {"after_from_start": [0.25, None], "after": [0.5, 0.125]}}
    (run / "run.json").write_text(json.dumps(stored))
    page = page_of(run)
    assert page.numbers("held-out")[-3:] == [(0.25, "0.2500"), (0.5, "0.5000"), (0.125, "0.1250")]
    assert "r<2" in [one[2] for one in page.all("th", "held-out")]
    assert "valid. r2" in [one[2] for one in page.all("th", "training")]
    assert {0.025, 0.05, 0.075, 0.1} <= {value for value, _ in page.numbers("training")}
    titles = [one[2] for one in page.all("h3", "training")]
    assert titles == ["Loss", "r2", "Seconds per outer step"]


def test_strata_are_those_of_run_json_and_the_largest_gain_comes_first(run):
    page, stored = page_of(run), held_out()
    order = sorted(
        stored["per_stratum"],
        key=lambda name: stored["per_stratum_at_start"][name] - stored["per_stratum"][name],
    )
    pairs = [(stored["per_stratum_at_start"][name], stored["per_stratum"][name]) for name in order]
    assert page.numbers("strata") == [(value, f"{100 * value:.1f}") for pair in pairs for value in pair]
    assert [one[2] for one in page.all("th", "strata")][3:] == order


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
    assert [value for value, _ in page.numbers("training")][: len(expected)] == expected
    cells = [one[2] for one in page.all("td", "training")]
    assert cells.count("not finite") == 4


def test_a_curve_goes_through_its_points():
    drawn = chart("Loss", [("query", "a", [(1, 3.0), (5, 2.0), (9, 1.0)]), ("none", "b", [])], 10)
    ((name, look, path),) = drawn["lines"]
    (x1, y1), (x2, y2), (x3, y3) = [map(float, pair) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    assert (name, look) == ("query", "a")
    assert (x2 - x1, y2 - y1) == pytest.approx((x3 - x2, y3 - y2))
    assert y1 < y2  # the greater value is higher on the page
    grid = {text: y for y, text in drawn["rows"]}
    assert [grid[text] for text in ("3", "2", "1")] == pytest.approx([y1, y2, y3])
    assert dict((text, x) for x, text in drawn["columns"])["10"] > x3
    assert drawn["words"] == "query from 3 at step 1 to 1 at step 9"


def test_a_spike_is_counted_and_not_drawn(run, tmp_path):
    page = page_of(run)
    check_message(
        page.all("p", "training")[0][2], "1 with a spike of the query loss", "not drawn", "left out"
    )
    assert page.all("desc")[0][2].startswith("support from 1.61 at step 1")
    highest = [one[2] for one in page.all("text", "training") if one[1]["class"] == "end"]
    assert float(highest[4]) < 1.7  # 7.5 does not flatten the rest


def test_a_run_without_problems_reports_none(tmp_path):
    lines = [{**line, "query_loss": 1.5, "skipped_tasks": 0} for line in metrics() if "query_loss" in line]
    for line in lines:
        line.pop("bad_tasks", None)
        line.pop("loss_spike", None)
    text = page_of(write_run(tmp_path / "run", lines)).all("p", "training")[0][2]
    assert "No spikes. No task was left out." in text


def test_the_time_of_a_step_adds_up(run, tmp_path):
    """By group, without the first step, which takes longer, and lines of other numbers of groups."""
    lines = metrics(5, groups=3) + [{**line, "step": line["step"] + 5} for line in metrics()]
    for folder in (run, write_run(tmp_path / "elastic", lines)):
        shown = [value for value, _ in page_of(folder).numbers("training")][-6:]
        assert shown[:3] == pytest.approx([1.65, 0.3, 0.05])
        assert shown[3:] == pytest.approx([1.6, 0.3, 0.1])


def test_confusion_is_that_of_run_json(run, tmp_path):
    page = page_of(run)
    cells = [one[2] for one in page.all("td", "confusion")]
    assert cells == ["4", "1", "·", "·", "5", "·", "2", "2", "1"]
    looks = [one[1]["class"] for one in page.all("td", "confusion")]
    assert looks == ["m4 right", "m1", "m0", "m0", "m5 right", "m0", "m2", "m2", "m1 right"]
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
    assert len(drawings) == 3
    assert all(one[1]["role"] == "img" and one[1]["aria-labelledby"] for one in drawings)
    assert "query from 1.6" in page.all("desc")[0][2]
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
    check_message(page.all("span")[0][2], "of 100", f"outer step {0 if lines == [] else 40}")
    assert page.all("table", "held-out") == []
    if lines == []:
        assert "No outer step is logged." in page.text


def test_a_report_of_ten_thousand_steps_is_small(tmp_path):
    folder = write_run(tmp_path / "run", metrics(10_000))
    began = time.process_time()
    file = write(folder)
    assert time.process_time() - began < 3
    assert file.stat().st_size < 700_000
    assert "(200 of 10000 steps;" in Page(file.read_text()).all("summary", "training")[0][2]


def test_a_long_line_is_drawn_by_means():
    assert means([(step, float(step % 2)) for step in range(1, 241)]) == [
        (4 * part + 2.5, 0.5) for part in range(60)
    ]
    assert means([(1, 3.0), (2, 5.0)]) == [(1, 3.0), (2, 5.0)]
    assert means([]) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 150, [0, 50, 100, 150]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.38, 1.62, [1.4, 1.45, 1.5, 1.55, 1.6]),
    ],
)
def test_axis_ticks_are_round_numbers(low, high, expected):
    assert marks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, ["0", "1"]), (2, ["0", "1", "2"]), (7, ["0", "2", "4", "6"]), (12, ["0", "5", "10"])],
)
def test_steps_on_the_axis_are_whole_and_different(tmp_path, steps, expected):
    page = page_of(write_run(tmp_path, metrics(steps), outer_steps=steps))
    charts = page.text.split("<svg ")[1:]
    labels = [re.findall(r'<text x="[^"]*" y="[^"]*" class="middle">([\d,]+)</text>', one) for one in charts]
    labels = [one for one in labels if one]
    assert labels == [expected] * 3


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
    check_message(message, f"output_dir={run}: report.html", "Is a directory", "copy the run to a folder")
    none, strange = tmp_path / "none", tmp_path / "strange"
    strange.mkdir()
    (strange / "run.json").write_text('{"settings": {}}')
    (run / "run.json").write_text("{")
    for words, parts in (
        (["--output_dir", str(none)], [f"output_dir={none}", "run.json", "give the folder of a run"]),
        (
            ["--output_dir", str(strange)],
            [f"output_dir={strange}", "cannot be written from run.json", "restore"],
        ),
        ([], ["output_dir is not given", "name the folder of a run"]),
        (["--output_dri", "x"], ["--output_dri", "did you mean --output_dir?", "--help lists them"]),
        (["--output_dir", str(run)], [f"{run / 'run.json'}", "correct or remove it"]),
    ):
        code, message = ended(*words)
        assert code == 2
        check_message(message, "fmmeta: error: ", *parts)


def test_a_report_that_fails_ends_no_run(run, monkeypatch):
    text = []
    monkeypatch.setattr(Facts, "outer_step", property(lambda self: 1 / 0))
    write_or_log(run, text.append)
    assert len(text) == 1
    check_message(text[0], f"{run / 'report.html'}", "ZeroDivisionError", "the run is not affected")
