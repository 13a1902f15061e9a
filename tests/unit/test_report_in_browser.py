"""report.html in a headless Chromium: no request, no message of the console, no sideways scrolling on a
phone, light and dark.
"""

import pytest

from fmmeta.report.page import write
from tests.support.browser import Browser, find
from tests.support.fake_runs import held_out, write_run
from tests.support.report_style import DARK, LIGHT

pytestmark = pytest.mark.skipif(
    find() is None, reason="no chromium; install one, or name it by FMMETA_CHROMIUM"
)


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
