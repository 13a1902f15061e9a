"""report.html tells what run.json and metrics.jsonl say, to the last digit, and nothing that a reader could
be harmed by. A headless Chromium renders it without requests, messages or sideways scrolling.
"""

import json
import re
import time
from html.parser import HTMLParser

import pytest

from fmmeta.report.page import Facts, chart, marks, means, write, write_or_log
from tests.support.browser import Browser, find
from tests.support.fake_runs import held_out, metrics, write_run
from tests.support.messages import check_message, exit_code
from tests.support.report_style import DARK, LIGHT, TEXTS

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The elements of a page: name, attributes, text, sections around it; fails where they are not closed in
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
        sections = [one[1].get("aria-labelledby") for one in self.open if one[0] == "section"]
        self.elements.append([name, dict(attributes), "", sections])
        if name not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, name):
        assert name in VOID or self.open.pop()[0] == name

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, name: str, section: str | None = None) -> list[list]:
        return [one for one in self.elements if one[0] == name and (section is None or section in one[3])]

    def texts(self, name: str, section: str | None = None) -> list[str]:
        return [one[2] for one in self.all(name, section)]

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
    [("better", "better"), ("worse", "worse"), ("no significant difference", "same"), ("", "same")],
)
def test_the_colour_follows_the_verdict(tmp_path, name, look):
    verdict = {"name": name, "text": "the <verdict>"}
    run = write_run(tmp_path, scored={"verdict": verdict, "units": 5, "kind": "class"})
    text = write(run).read_text(encoding="utf-8")
    assert f'<p class="verdict {look}">Verdict: the &lt;verdict&gt;.</p>' in text
    assert re.findall(r'<div class="hero (\w+)">', text) == ["a", "b", look]
    assert "over their 5 classes" in text


def test_the_table_is_that_of_run_json(run):
    names, expected = ("before adaptation, meta-trained", "after adaptation, weights at the start"), []
    for name in (*names, "after adaptation, meta-trained", "gain"):
        sign, row = "+" if name == "gain" else "", held_out()[name]
        (accuracy, wide), (loss, far) = row["accuracy"], row["loss"]
        expected += [(accuracy, f"{100 * accuracy:{sign}.1f}"), (wide, f"{100 * wide:.1f}")]
        expected += [(loss, f"{loss:{sign}.4f}"), (far, f"{far:.4f}")]
    assert page_of(run).numbers("held-out") == expected


def test_own_metrics_have_a_table_a_column_and_a_chart(tmp_path):
    """Of a kind of task without an accuracy, as regression."""
    lines = [{key: line[key] for key in line if "accuracy" not in key} for line in metrics()]
    lines = [line | {"valid_r2": line["step"] / 1000} if "valid_loss" in line else line for line in lines]
    own = {"r<2": {"after_from_start": [0.25, None], "after": [0.5, 0.125]}}
    page = page_of(write_run(tmp_path, lines, scored={"metrics": own}))
    assert page.numbers("held-out")[-3:] == [(0.25, "0.2500"), (0.5, "0.5000"), (0.125, "0.1250")]
    assert {"r<2", "valid. r2"} <= {*page.texts("th", "held-out"), *page.texts("th", "training")}
    assert {0.025, 0.05, 0.075, 0.1} <= {value for value, _ in page.numbers("training")}
    assert page.texts("h3", "training") == ["Loss", "r2", "Seconds per outer step"]


def test_strata_are_those_of_run_json_and_the_largest_gain_comes_first(run):
    page, stored = page_of(run), held_out()
    start, trained = stored["per_stratum_at_start"], stored["per_stratum"]
    order = sorted(trained, key=lambda name: start[name] - trained[name])
    values = [of[name] for name in order for of in (start, trained)]
    assert page.numbers("strata") == [(value, f"{100 * value:.1f}") for value in values]
    assert page.texts("th", "strata")[3:] == order


def test_curves_hold_the_numbers_of_metrics(run):
    page, by_step = page_of(run), dict[int, dict]()
    keys = ("support_loss", "query_loss", "accuracy", "valid_loss", "valid_accuracy", "grad_norm", "lr")
    for line in metrics():
        by_step.setdefault(line["step"], {}).update(line)
    found = [line.get(key) for line in by_step.values() for key in (*keys, "skipped_tasks")]
    expected = [value for value in found if value is not None]
    assert [value for value, _ in page.numbers("training")][: len(expected)] == expected
    assert page.texts("td", "training").count("not finite") == 4


def test_a_curve_goes_through_its_points():
    drawn = chart("Loss", [("query", "a", [(1, 3.0), (5, 2.0), (9, 1.0)]), ("none", "b", [])], 10)
    assert drawn["words"] == "query from 3 at step 1 to 1 at step 9"
    ((name, look, path),) = drawn["lines"]
    assert (name, look) == ("query", "a")
    x, y = zip(*[map(float, pair) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)], strict=True)
    assert (x[1] - x[0], y[1] - y[0]) == pytest.approx((x[2] - x[1], y[2] - y[1]))
    assert y[0] < y[1]  # the greater value is higher on the page
    grid = {text: place for place, text in drawn["rows"]}
    assert [grid[text] for text in ("3", "2", "1")] == pytest.approx(y)
    assert [place > x[2] for place, text in drawn["columns"] if text == "10"] == [True]


QUIET = [
    {**{key: line[key] for key in metrics(1)[0]}, "query_loss": 1.5, "skipped_tasks": 0}
    for line in metrics()
    if "query_loss" in line
]


@pytest.mark.parametrize(
    ("given", "name", "section", "parts"),
    [
        ({}, "caption", "held-out", ("37 held-out 5-way 5-shot episodes",)),
        ({}, "desc", "training", ("support from 1.61 at step 1", "query from 1.6")),
        ({}, "p", "training", ("1 with a spike of the query loss", "not drawn", "left out")),
        ({"lines": QUIET}, "p", "training", ("No spikes. No task was left out.",)),
        (
            {"scored": {"confusion": {"left_out": "pipeline_stages=2: no answers"}}},
            "p",
            "confusion",
            ("No confusion matrix", "pipeline_stages=2"),
        ),
        ({"lines": metrics(40), "finished": False}, "span", None, ("of 100", "outer step 40")),
        ({"lines": [], "finished": False}, "span", None, ("of 100", "outer step 0")),
    ],
)
def test_sentences_follow_the_run(tmp_path, given, name, section, parts):
    check_message(page_of(write_run(tmp_path, **given)).texts(name, section)[0], *parts)


def test_a_spike_is_not_drawn(run):
    ends = [one[2] for one in page_of(run).all("text", "training") if one[1]["class"] == "end"]
    assert float(ends[4]) < 1.7  # 7.5 does not flatten the rest


@pytest.mark.parametrize("elastic", [False, True])
def test_the_time_of_a_step_adds_up(tmp_path, elastic):
    """By group, without the first step, which takes longer, and lines of other numbers of groups."""
    others = metrics(5, groups=3) if elastic else []
    lines = [*others, *({**line, "step": line["step"] + len(others)} for line in metrics())]
    shown = [value for value, _ in page_of(write_run(tmp_path, lines)).numbers("training")][-6:]
    assert shown == pytest.approx([1.65, 0.3, 0.05, 1.6, 0.3, 0.1])


def test_confusion_is_that_of_run_json(run):
    cells = [(one[2], one[1]["class"]) for one in page_of(run).all("td", "confusion")]
    texts, looks = zip(*cells, strict=True)
    assert "".join(texts) == "41··5·221"
    assert " ".join(looks) == "m4 right m1 m0 m0 m5 right m0 m2 m2 m1 right"


def test_names_from_data_never_become_markup(tmp_path):
    evil = '<script>alert("x")</script><img src=http://a.test/x onerror=y>&amp;\'"'
    strata = {evil: 0.5, "pair": 0.25}
    confusion = {"classes": [evil, "y", "z"], "task": evil, "stratum": evil}
    scored = {
        "confusion": {**held_out()["confusion"], **confusion},
        "per_stratum": strata,
        "per_stratum_at_start": strata,
    }
    folder = write_run(tmp_path, scored=scored, dataset=[evil], algorithm=evil, model_name_or_path=evil)
    stored = json.loads((folder / "run.json").read_text())
    stored["layout"] = stored["versions"][evil] = evil
    (folder / "run.json").write_text(json.dumps(stored))
    page = page_of(folder)
    assert not {"script", "img"} & {one[0] for one in page.elements}
    assert evil in page.texts("h1")[0]
    assert evil in page.texts("th", "strata")
    assert f"1  {evil}" in page.texts("th", "confusion")
    assert all(not key.startswith("on") for one in page.elements for key in one[1])


def test_the_page_requests_nothing(run):
    page = page_of(run)
    policies = {one[1].get("http-equiv"): one[1].get("content") for one in page.all("meta")}
    assert policies["Content-Security-Policy"].startswith("default-src 'none'")
    keys = ("src", "href", "xlink:href", "action")
    assert [one[1][key] for one in page.elements for key in keys if one[1].get(key)] == ["data:,"]
    (sheet,) = page.texts("style")
    assert not re.search(r"url\(|@import", sheet)


def test_the_page_works_with_a_screen_reader(run):
    page = page_of(run)
    ids = [one[1]["id"] for one in page.elements if "id" in one[1]]
    named = " ".join(one[1].get("aria-labelledby", "") for one in page.elements).split()
    assert set(named) <= set(ids)
    assert len(ids) == len(set(ids))
    drawings = [one[1] for one in page.all("svg") if one[1].get("aria-hidden") != "true"]
    assert [one["role"] for one in drawings if one["aria-labelledby"]] == ["img"] * 3
    assert page.all("html")[0][1]["lang"] == "en"
    assert all(one[1]["scope"] for one in page.all("th"))


def test_secrets_are_not_shown(tmp_path):
    data, model = "https://me:pa55word@host.test/data?token=abc123", "hf_abcdefghijklmnopqrstuv"
    text = write(write_run(tmp_path, dataset=[data], model_name_or_path=model)).read_text()
    assert not re.search("pa55word|abc123|abcdefghijklmnopqrstuv", text)
    assert "host.test" in text


@pytest.mark.parametrize("steps", [40, 0])
def test_a_report_of_an_unfinished_run_leaves_out_an_unfinished_line(tmp_path, steps):
    folder = write_run(tmp_path / "run", metrics(steps), finished=False)
    whole = page_of(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "query_lo')  # as another process finds it
    assert page_of(folder).numbers("training") == whole.numbers("training")
    assert whole.all("table", "held-out") == []
    assert ("No outer step is logged." in whole.text) == (steps == 0)


def test_a_report_of_ten_thousand_steps_is_small(tmp_path):
    folder, began = write_run(tmp_path / "run", metrics(10_000)), time.process_time()
    page = page_of(folder)
    assert time.process_time() - began < 6  # with the time to read it
    assert (folder / "report.html").stat().st_size < 700_000
    assert "(200 of 10000 steps;" in page.texts("summary", "training")[0]


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
    pattern = re.compile(r'<text x="[^"]*" y="[^"]*" class="middle">([\d,]+)</text>')
    labels = [pattern.findall(chart) for chart in page.text.split("<svg ")[1:]]
    assert [one for one in labels if one] == [expected] * 3


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
        code = exit_code(["report", *map(str, words)])
        return code, "".join(capsys.readouterr()).strip()

    assert ended("--output_dir", run) == (0, f"fmmeta: report {run / 'report.html'}")
    assert Page((run / "report.html").read_text()).texts("h1")[0] == "fomaml on letters"
    none, strange, full, damaged = (tmp_path / name for name in ("none", "strange", "full", "damaged"))
    (write_run(full) / "report.html").mkdir()
    for folder, text in ((strange, '{"settings": {}}'), (damaged, "{")):
        folder.mkdir()
        (folder / "run.json").write_text(text)
    for words, parts in (
        (["--output_dir", full], [f"output_dir={full}: report.html", "Is a directory", "copy the run to"]),
        (["--output_dir", none], [f"output_dir={none}", "run.json", "give the folder of a run"]),
        (["--output_dir", strange], [f"output_dir={strange}", "cannot be written from run.json", "restore"]),
        ([], ["output_dir is not given", "name the folder of a run"]),
        (["--output_dri", "x"], ["--output_dri", "did you mean --output_dir?", "--help lists them"]),
        (["--output_dir", damaged], [f"{damaged / 'run.json'}", "correct or remove it"]),
    ):
        code, message = ended(*words)
        assert code == 2
        check_message(message, "fmmeta: error: ", *parts)


def test_a_report_that_fails_ends_no_run(run, monkeypatch):
    text = []
    monkeypatch.setattr(Facts, "outer_step", property(lambda self: 1 / 0))
    write_or_log(run, text.append)
    check_message(*text, f"{run / 'report.html'}", "ZeroDivisionError", "the run is not affected")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    long = "a_class_whose_name_is_much_longer_than_a_telephone_is_wide_and_has_no_place_to_break"
    return write(
        write_run(tmp_path_factory.mktemp("run") / long, dataset=[long], model_name_or_path=f"/models/{long}")
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.skipif(find() is None, reason="no chromium; install one, or name it by FMMETA_CHROMIUM")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_report_renders_without_requests_or_scrolling(browser, file, width, scheme):
    browser.events.clear()
    browser.open(file, width, scheme)
    assert browser.ask("innerWidth") == width
    for fold in ("false", "true"):  # also with everything unfolded
        browser.ask(f"document.querySelectorAll('details').forEach(one => one.open = {fold})")
        assert browser.ask("document.documentElement.scrollWidth") <= width
        wide = browser.ask(
            "[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll, svg') &&"
            " one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML.slice(0, 90))"
        )
        assert wide == []
    colours = LIGHT if scheme == "light" else DARK
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == rgb(colours["page"])
    assert browser.ask("getComputedStyle(document.body).color") == rgb(colours["ink"])
    assert browser.ask("getComputedStyle(document.querySelector('.curve.a')).stroke") == rgb(colours["a"])
    text = browser.ask("document.body.innerText")
    for expected in (
        "Finished",
        "Before and after",
        "By stratum",
        "Training",
        "One held-out episode",
    ):
        assert expected in text
    accuracy, half = held_out()["after adaptation, meta-trained"]["accuracy"]
    assert f"{100 * accuracy:.1f} ±\N{NO-BREAK SPACE}{100 * half:.1f}" in text
    smallest = browser.ask(
        "Math.min(...[...document.querySelectorAll('svg text')]"
        ".map(one => one.getBoundingClientRect().height))"
    )
    assert smallest > 11  # of a line of text, in pixels
    methods = [event["method"] for event in browser.events]
    asked = [
        e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"
    ]
    assert {url for url in asked if not url.startswith("data:")} == {file.resolve().as_uri()}
    assert not {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"} & set(methods), (
        browser.events
    )
