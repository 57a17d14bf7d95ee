"""The operator's page as it is served: what it says without a script, what the feed says, and what both cost."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest

from kvikk.server.messages import HostKV, Snapshot, Stats
from kvikk.server.metrics import RecentStats
from kvikk.server.page import routes
from kvikk.server.page.chart import area, bar
from kvikk.server.page.feed import Sampler, events
from kvikk.server.page.view import SHOWN_REQUESTS, View, make_view
from kvikk.server.page.words import duration, share
from server.page_server import READY, REQUEST, SNAPSHOT, STATS, PageServer, running

HOSTILE = """"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;"""


@pytest.fixture
def page() -> Iterator[PageServer]:
    with running(PageServer()) as server:
        yield server


def shown(html: str, name: str) -> str:
    """The text in a place of the page."""
    (text,) = set(re.findall(rf'data-text="{name}">([^<]*)<', html))
    return unescape(text)


def states(page: PageServer, count: int, **headers: str) -> list[dict[str, Any]]:
    """The first events of the feed."""
    found = []
    with httpx.stream("GET", page.url + "live", headers=headers, timeout=10) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    raise AssertionError(f"the feed ended after {len(found)} states")


# What it says


def test_the_page_says_all_without_a_script(page: PageServer) -> None:
    html = httpx.get(page.url).text
    assert shown(html, "model") == "smollm2"
    assert shown(html, "uptime") == "up 1 h 02 min"
    assert [shown(html, name) for name in ("held", "pinned", "cached", "free")] == ["300", "100", "200", "500"]
    assert [shown(html, f"{name}-share") for name in ("held", "cached", "free")] == ["30 %", "20 %", "50 %"]
    assert shown(html, "held-bytes") == "105.5 MiB"
    assert shown(html, "bar") == "Of 1,000 blocks 300 are held, 200 cached and 500 free"
    assert shown(html, "hit-rate") == "25 %"
    cells = re.findall(r'<t[hd][^>]*data-cell="(\w+)"[^>]*>([^<]+)<', html)
    assert ("id", "cmpl-1") in cells
    assert ("cached", "800") in cells
    assert ("kept", "25 %, snapkv") in cells
    assert ("name", "system prompt") in cells
    assert '<rect class="cached" height="10" id="bar-cached" x="300.0" width="200.0"/>' in html
    assert re.search(r'<p id="death" role="alert" hidden>', html)


def test_the_page_and_the_feed_say_the_same(page: PageServer) -> None:
    (state,) = states(page, 1)
    html = httpx.get(page.url).text  # within the second, and so of the same sample
    places = set(re.findall(r'data-text="([\w-]+)"', html))
    assert places == set(state["texts"])
    assert {name: shown(html, name) for name in places} == state["texts"]
    for name, attributes in state["shapes"].items():
        (found,) = re.findall(rf'id="{name}"([^/>]*)/>', html)
        assert dict(re.findall(r'(\w+)="([^"]*)"', found)) == attributes


def test_what_a_client_chose_is_text(page: PageServer) -> None:
    page.snapshot = Snapshot(
        stats=STATS,
        requests=[msgspec.structs.replace(REQUEST, id=HOSTILE)],
        pins=[msgspec.structs.replace(SNAPSHOT.pins[0], name=HOSTILE)],
    )
    page.dead_reason = HOSTILE
    html = httpx.get(page.url).text
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert [unescape(text) for text in re.findall(r'data-cell="(?:id|name)">([^<]+)<', html)] == [HOSTILE, HOSTILE]
    assert [unescape(key) for key in re.findall(r'data-key="([^"]+)"', html)] == [HOSTILE, HOSTILE]


def test_nothing_but_the_server_s_own_files_can_run_or_load(page: PageServer) -> None:
    response = httpx.get(page.url)
    policy = dict(rule.strip().split(" ", 1) for rule in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", response.text)
    for target in re.findall(r'(?:src|href)="([^"]+)"', response.text):
        assert not re.match(r"/|\w+:", target), f"{target} does not lie beneath the page"
        if target.startswith("page/"):
            assert httpx.get(page.url + target).status_code == 200
    assert response.headers["x-content-type-options"] == "nosniff"


def test_no_other_file_can_be_had(page: PageServer) -> None:
    for name in ("view.py", "page.html", "..%2Fmessages.py", "%2e%2e%2fconfig.py", ""):
        assert httpx.get(page.url + "page/" + name).status_code == 404


def test_a_dead_engine_is_on_the_page(page: PageServer) -> None:
    page.dead_reason = "the engine is dead: the engine process was ended by signal 9"
    html = httpx.get(page.url).text
    assert re.search(r'<p id="death" role="alert">', html)
    assert page.dead_reason in html


def test_more_requests_than_fit_are_counted() -> None:
    requests = [msgspec.structs.replace(REQUEST, id=str(i), state="waiting", age_s=i) for i in range(1000)]
    view = make_view(READY, Snapshot(stats=STATS, pins=[], requests=requests), 0.0, None, RecentStats(0.0), 1.0)
    assert len(view.requests) == SHOWN_REQUESTS
    assert view.texts["more-requests"] == "and 800 more"
    assert view.texts["waiting-note"] == "the oldest for 16 min 39 s"


def test_the_host_s_memory_is_on_the_page_where_it_holds_kv() -> None:
    def said(stats: Stats) -> str:
        snapshot = Snapshot(stats=stats, pins=[], requests=[])
        return make_view(READY, snapshot, 0.0, None, RecentStats(0.0), 1.0).texts["host"]

    assert said(STATS) == ""
    host = HostKV(used_bytes=3 * 2**29, total_bytes=2**32)
    assert said(Stats(host=host)) == "Whole KV in the host's memory: 1.5 GiB of 4.0 GiB."
    host = msgspec.structs.replace(host, parted=3)
    assert said(Stats(host=host)).endswith("4.0 GiB; 3 texts have parted with theirs.")


def test_the_figures_of_the_last_minute_are_differences_of_counters() -> None:
    recent = RecentStats(0.0)
    recent.note(100.0, Stats(prefix_queries=1000, prefix_hits=1000, generated_tokens=50, preemptions=2))
    recent.note(
        180.0,
        now := Stats(prefix_queries=3000, prefix_hits=1500, generated_tokens=650, preemptions=5, evicted_blocks=7),
    )
    texts = make_view(READY, Snapshot(stats=now, pins=[], requests=[]), 0.0, None, recent, 190.0).texts
    assert texts["window"] == "Last minute"
    assert (texts["hit-rate"], texts["hit-rate-note"]) == ("25 %", "500 of 2,000 prompt tokens")
    assert texts["generated"] == "10.0"
    assert (texts["preemptions"], texts["preemptions-note"]) == ("3", "5 since the start")
    assert texts["evicted"] == "7"


def test_a_server_without_prompts_has_no_hit_rate_and_one_without_steps_no_rates() -> None:
    idle = Snapshot(stats=Stats(), pins=[], requests=[])
    texts = make_view(READY, idle, 0.0, None, RecentStats(5.0), 5.0).texts
    assert (texts["hit-rate"], texts["hit-rate-note"]) == ("\N{EN DASH}", "no prompts")
    assert texts["generated"] == "0"
    assert texts["requests-note"] == "No request runs or waits."
    assert texts["pins-note"] == "Nothing is pinned."


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0 s"), (4.24, "4.2 s"), (59.9, "59 s"), (185, "3 min 05 s"), (7385, "2 h 03 min"), (446400, "5 d 04 h")],
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(("part", "words"), [(0, "0 %"), (1, "< 1 %"), (500, "50 %"), (999, "> 99 %"), (1000, "100 %")])
def test_a_share_is_nothing_or_all_only_when_it_is(part: int, words: str) -> None:
    assert share(part, 1000) == words


def test_the_parts_of_the_bar_stand_side_by_side() -> None:
    assert bar((1, 2, 0), 4) == [
        {"x": "0.0", "width": "250.0"},
        {"x": "250.0", "width": "500.0"},
        {"x": "750.0", "width": "0.0"},
    ]
    assert bar((0,), 0) == [{"x": "0", "width": "0"}]


def test_the_area_holds_each_value_until_the_next() -> None:
    assert area([(60.0, 0), (30.0, 5), (0.0, 10)], 10) == "M0.0 100V100.0H300.0V50.0H600.0V0.0V100Z"
    assert area([], 10) == ""


# The feed


def test_the_feed_begins_at_once_and_goes_on_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(PageServer()) as page:
        states(page, 3)
        assert min(later - earlier for earlier, later in pairwise(page.asked_s)) > 0.8
    monkeypatch.setattr(routes, "INTERVAL_S", 1000.0)
    with running(PageServer()) as page:
        assert states(page, 1), "the first state waits for no interval"


def test_all_pages_together_ask_the_engine_once_a_second(page: PageServer) -> None:
    async def watch(client: httpx.AsyncClient) -> None:
        seen = 0
        async with client.stream("GET", page.url + "live") as response:
            async for line in response.aiter_lines():
                seen += line.startswith("data: ")
                if seen == 3:
                    return

    async def watch_all() -> None:
        limits = httpx.Limits(max_connections=None)
        async with asyncio.timeout(60), httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(watch(client) for _ in range(20)), *(client.get(page.url) for _ in range(20)))

    asyncio.run(watch_all())
    assert len(page.asked_s) >= 3
    assert min(later - earlier for earlier, later in pairwise(page.asked_s)) > 0.8


def test_nobody_asks_the_engine_when_nobody_looks(page: PageServer) -> None:
    states(page, 2)
    asked, deadline_s = 0, time.monotonic() + 30
    while asked != len(page.asked_s):  # until the server has seen that its reader is gone
        assert time.monotonic() < deadline_s
        asked = len(page.asked_s)
        time.sleep(1.2)


def test_the_feed_is_guarded_and_the_page_then_tells_nothing() -> None:
    with running(PageServer(key="secret")) as page:
        assert httpx.get(page.url + "live").status_code == 401
        html = httpx.get(page.url).text
        assert shown(html, "model") == ""
        assert "cmpl-1" not in html
        assert page.asked_s == []
        (state,) = states(page, 1, Authorization="Bearer secret")
        assert state["texts"]["model"] == "smollm2"


def test_the_page_does_not_wait_for_a_long_step() -> None:
    with running(PageServer(delay_s=60)) as page:
        assert "in a long step" in httpx.get(page.url, timeout=30).text


def test_none_of_it_is_in_the_schema() -> None:
    assert PageServer().app().openapi()["paths"] == {}


def _view() -> View:
    return make_view(READY, SNAPSHOT, 0.0, None, RecentStats(0.0), 1.0)


def test_a_feed_that_waits_for_the_engine_shows_that_it_lives() -> None:
    async def run() -> None:
        enough, stopping, comments = asyncio.Event(), asyncio.Event(), 0

        async def slow() -> View:
            await enough.wait()
            return _view()

        begun_s = time.monotonic()
        async for event in events(Sampler(slow, 10.0), stopping, heartbeat_s=0.05):
            if enough.is_set():
                assert event.startswith(b"data: {")
                stopping.set()
                continue
            assert event.startswith(b": ")
            assert event.endswith(b"\n\n")
            comments += 1
            if comments == 3:
                assert time.monotonic() - begun_s > 0.14, "one every heartbeat"
                enough.set()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_feeds_end_when_the_server_stops_even_in_a_long_step() -> None:
    async def never() -> View:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        stopping = asyncio.Event()
        async for event in events(Sampler(never, 1.0), stopping, heartbeat_s=0.05):
            assert event.startswith(b": ")
            stopping.set()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_leaves_does_not_undo_the_sample_that_others_wait_for() -> None:
    taken = 0

    async def run() -> None:
        let_go = asyncio.Event()

        async def slow() -> View:
            nonlocal taken
            taken += 1
            await let_go.wait()
            return _view()

        sampler = Sampler(slow, 10.0)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sampler.latest(), 0.02)
        let_go.set()
        assert await sampler.latest() is await sampler.latest()

    asyncio.run(run())
    assert taken == 1


def test_a_failed_sample_is_tried_again_after_the_interval() -> None:
    tries = 0

    async def fails_once() -> View:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("for once")
        return _view()

    async def run() -> None:
        sampler = Sampler(fails_once, 0.5)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await sampler.latest()
        await asyncio.sleep(0.51)
        await sampler.latest()

    asyncio.run(run())
    assert tries == 2
