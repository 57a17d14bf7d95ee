"""The operator's page in a browser: what its reader sees while the server lives, and when it does not."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from kvikk.server.messages import Pin, Snapshot
from server.page_server import REQUEST, SNAPSHOT, STATS, PageServer, running

CHROMIUM = shutil.which("chromium")
HOSTILE = "<img src=x onerror='document.title=\"run\"'><script>document.title='run'</script>"

PATIENCE_MS = 60_000
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Reader:
    """A tab, and everything that it complained of: errors, and what the content policy refused."""

    tab: Page
    complaints: list[str] = field(default_factory=list)

    def text(self, place: str) -> str:
        """What is in a place of the page."""
        return self.tab.locator(f"[data-text={place}]").first.inner_text()

    def expect(self, place: str, text: str) -> None:
        """Wait until a place says this."""
        expect(self.tab.locator(f"[data-text={place}]").first).to_have_text(text, timeout=PATIENCE_MS)

    def expect_status(self, pattern: str) -> None:
        """Wait until the status says this."""
        expect(self.tab.locator("#status")).to_have_text(re.compile(pattern), timeout=PATIENCE_MS)

    def cells(self, column: str, table: str = "requests") -> list[str]:
        """A column of a table."""
        return self.tab.locator(f"#{table} [data-cell={column}]").all_inner_texts()


def open_page(browser: Browser, url: str, **options: object) -> Reader:
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    reader = Reader(context.new_page())
    reader.tab.on("console", lambda message: reader.complaints.append(message.text))
    reader.tab.on("pageerror", lambda error: reader.complaints.append(str(error)))
    reader.tab.goto(url)
    return reader


@pytest.fixture
def page() -> Iterator[PageServer]:
    with running(PageServer()) as server:
        yield server


@pytest.fixture
def reader(browser: Browser, page: PageServer) -> Iterator[Reader]:
    reader = open_page(browser, page.url)
    yield reader
    reader.tab.context.close()


def bar_width(reader: Reader, part: str) -> float:
    """In pixels."""
    box = reader.tab.locator(f"#bar-{part}").bounding_box()
    assert box is not None
    return box["width"]


def test_the_bar_and_the_numbers_follow_the_feed(page: PageServer, reader: Reader) -> None:
    reader.expect_status("^live")
    whole = reader.tab.locator("#bar").bounding_box()
    assert whole is not None
    assert bar_width(reader, "cached") == pytest.approx(0.2 * whole["width"], abs=3)
    page.change(held_blocks=100, pinned_blocks=0, cached_blocks=900, free_blocks=0, running=7)
    reader.expect("held", "100")
    assert reader.text("cached-share") == "90 %"
    assert reader.text("running") == "7"
    assert bar_width(reader, "cached") == pytest.approx(0.9 * whole["width"], abs=3)
    assert reader.tab.locator("#bar").get_attribute("aria-labelledby") == "bar-title"
    assert reader.tab.locator("#bar-title").text_content() == "Of 1,000 blocks 100 are held, 900 cached and 0 free"
    assert reader.complaints == []


def test_rows_come_stay_and_go_with_their_requests(page: PageServer, reader: Reader) -> None:
    reader.expect_status("^live")
    reader.tab.locator("#requests tr").evaluate("row => row.isTheFirst = true")
    new = msgspec.structs.replace(REQUEST, id="cmpl-2", state="waiting", blocks=0)
    page.snapshot = Snapshot(stats=STATS, pins=[], requests=[msgspec.structs.replace(REQUEST, blocks=99), new])
    expect(reader.tab.locator("#requests tr")).to_have_count(2, timeout=PATIENCE_MS)
    assert reader.cells("id") == ["cmpl-1", "cmpl-2"]
    assert reader.cells("state") == ["decode", "waiting"]
    assert reader.cells("blocks") == ["99", "0"]
    first, second = reader.tab.locator("#requests tr").all()
    assert first.evaluate("row => row.isTheFirst") is True
    assert second.evaluate("row => row.isTheFirst") is None
    assert reader.cells("name", "pins") == []
    page.snapshot = Snapshot(stats=STATS, pins=[Pin(name="tools", blocks=3)], requests=[new])
    expect(reader.tab.locator("#requests tr")).to_have_count(1, timeout=PATIENCE_MS)
    assert reader.cells("id") == ["cmpl-2"]
    assert reader.cells("name", "pins") == ["tools"]
    page.snapshot = Snapshot(stats=STATS, pins=[], requests=[])
    expect(reader.tab.locator("#requests tr")).to_have_count(0, timeout=PATIENCE_MS)
    assert reader.tab.get_by_text("No request runs or waits.").is_visible()
    assert reader.complaints == []


def test_rows_keep_the_order_of_the_feed(page: PageServer, reader: Reader) -> None:
    reader.expect_status("^live")
    for order in ("abcd", "dbca", "cx", "ycxa"):
        requests = [msgspec.structs.replace(REQUEST, id=name) for name in order]
        page.snapshot = Snapshot(stats=STATS, pins=[], requests=requests)
        expect(reader.tab.locator("#requests [data-cell=id]")).to_have_text(list(order), timeout=PATIENCE_MS)


@pytest.mark.parametrize("has_script", [True, False])
def test_an_id_that_is_markup_is_shown_as_the_text_that_it_is(
    browser: Browser, page: PageServer, has_script: bool
) -> None:
    hostile = Snapshot(
        stats=STATS,
        requests=[msgspec.structs.replace(REQUEST, id=HOSTILE), msgspec.structs.replace(REQUEST, id="__proto__")],
        pins=[Pin(name=HOSTILE, blocks=1)],
    )
    page.snapshot = SNAPSHOT if has_script else hostile
    reader = open_page(browser, page.url, java_script_enabled=has_script)
    page.snapshot = hostile
    page.dead_reason = HOSTILE if has_script else None
    expect(reader.tab.locator("#requests [data-cell=id]")).to_have_text([HOSTILE, "__proto__"], timeout=PATIENCE_MS)
    assert reader.cells("name", "pins") == [HOSTILE]
    assert reader.tab.locator("main img, main script").count() == 0
    assert "run" not in reader.tab.title()
    assert reader.complaints == []
    if has_script:
        expect(reader.tab.locator("#death-reason")).to_have_text(HOSTILE)
    reader.tab.context.close()


def test_the_page_is_read_without_a_script(browser: Browser, page: PageServer) -> None:
    reader = open_page(browser, page.url, java_script_enabled=False)
    assert reader.text("held") == "300"
    assert reader.cells("id") == ["cmpl-1"]
    assert bar_width(reader, "held") > 0
    reader.expect_status("as it was at loading")
    reader.tab.context.close()


def test_a_dead_engine_is_seen(page: PageServer, reader: Reader) -> None:
    reader.expect_status("^live")
    assert reader.tab.locator("#death").is_hidden()
    page.dead_reason = "the engine is dead: the engine process was ended by signal 9"
    expect(reader.tab.get_by_role("alert")).to_contain_text(page.dead_reason, timeout=PATIENCE_MS)
    reader.expect_status("^dead")
    assert reader.tab.title().startswith("dead: ")
    assert reader.text("held") == "300"
    assert reader.complaints == []


def test_a_lost_server_is_seen_and_found_again(browser: Browser) -> None:
    page = PageServer()
    with running(page):
        reader = open_page(browser, page.url)
        reader.expect_status("^live")
    reader.expect_status("^no connection .* again in [0-9]+ s$")
    assert reader.text("held") == "300"
    port = int(page.url.rstrip("/").rpartition(":")[2])
    again = PageServer()
    again.change(held_blocks=42)
    with running(again, port):
        reader.expect_status("^live")
        reader.expect("held", "42")
    reader.tab.context.close()


def test_a_long_step_is_seen(browser: Browser) -> None:
    with running(PageServer()) as page:
        reader = open_page(browser, page.url)
        reader.expect_status("^live")
        page.delay_s = 6.0
        reader.expect_status("the engine is in a long step, silent for [0-9]+ s")
        reader.expect_status("^live")
        assert reader.complaints == []
        reader.tab.context.close()


def test_a_page_that_is_not_seen_does_not_ask(page: PageServer, reader: Reader) -> None:
    reader.expect_status("^live")
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    reader.tab.evaluate(hide % "true" + tell)
    asked, deadline_s = 0, time.monotonic() + 30
    while asked != len(page.asked_s):  # until the server has seen that its reader is gone
        assert time.monotonic() < deadline_s
        asked = len(page.asked_s)
        reader.tab.wait_for_timeout(1500)
    page.change(held_blocks=5)
    reader.tab.evaluate(hide % "false" + tell)
    reader.expect("held", "5")


def test_a_key_is_asked_for_sent_and_kept_in_the_tab_alone(browser: Browser) -> None:
    with running(PageServer(key="a secret")) as page:
        reader = open_page(browser, page.url)
        key = reader.tab.get_by_label("API key")
        expect(key).to_be_focused()
        reader.expect_status("waiting for the key")
        assert reader.tab.locator("#state").is_hidden()
        assert page.asked_s == []
        assert reader.complaints == []

        key.fill("a wrong one")
        key.press("Enter")
        expect(reader.tab.get_by_text("this key is not known here")).to_be_visible()
        assert reader.tab.evaluate("sessionStorage.length") == 0

        key.fill("a secret")
        key.press("Enter")
        reader.expect_status("^live")
        assert reader.text("held") == "300"
        assert key.is_hidden()
        assert "secret" not in reader.tab.url
        assert reader.tab.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]

        reader.tab.reload()
        reader.expect_status("^live")
        other_tab = reader.tab.context.new_page()
        other_tab.goto(page.url)
        expect(other_tab.get_by_label("API key")).to_be_visible()

        reader.tab.get_by_role("button", name="forget the key").click()
        expect(key).to_be_visible()
        assert reader.tab.evaluate("sessionStorage.length") == 0
        reader.tab.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Browser, page: PageServer, scheme: str) -> None:
    reader = open_page(browser, page.url, color_scheme=scheme)
    reader.expect_status("^live")
    ratios = reader.tab.evaluate(CONTRASTS)
    assert len(ratios) > 40
    worst = min(ratios, key=lambda item: item[1])
    assert worst[1] >= 4.5, worst
    reader.tab.context.close()


@pytest.mark.parametrize("width", [320, 390, 800, 1400])
def test_the_page_is_as_wide_as_the_screen(browser: Browser, page: PageServer, width: int) -> None:
    long = msgspec.structs.replace(REQUEST, id="a-very-long-id-" * 20, texts=16, prompt_tokens=1_234_567)
    page.snapshot = Snapshot(stats=STATS, pins=[Pin(name="p" * 300, blocks=1)], requests=[long])
    reader = open_page(browser, page.url, viewport={"width": width, "height": 800})
    reader.expect_status("^live")
    assert reader.tab.evaluate("document.documentElement.scrollWidth") <= width
    reader.tab.context.close()


# WCAG 2.2, "relative luminance" and "contrast ratio", of every text that is seen against the ground behind it.
CONTRASTS = """() => {
  const channels = (color) => color.match(/[0-9.]+/g).map(Number);
  const luminance = (color) => {
    const [r, g, b] = channels(color).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.body.querySelectorAll("*")]
    .filter((e) => e.checkVisibility() && !e.closest("svg, noscript, template")
      && [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()))
    .map((e) => {
      const [dark, light] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((a, b) => a - b);
      return [e.outerHTML.slice(0, 80), (light + 0.05) / (dark + 0.05)];
    });
}"""
