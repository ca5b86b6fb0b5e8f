"""The page in a real browser: keyboard alone, light and dark, narrow and wide, and a link that holds the question."""

import asyncio
import threading

import pytest
import uvicorn

from meshwright.endpoint import hosts
from meshwright.ui.server import build
from tests.ui import browser
from tests.ui.local import QUESTION, Local

pytestmark = pytest.mark.skipif(browser.found() is None, reason="chromium is not installed")
WORDS = "&".join(f"{key}={text}" for key, text in QUESTION.items()).replace(" ", "+")
VERDICT = "document.querySelector('[data-part=fit]').classList.contains('good')"
SETTLED = f"{VERDICT} && document.querySelector('[data-panel=time] .waterfall')"


@pytest.fixture(scope="module")
def url():
    """The page, served by this process on a free port."""
    made = hosts.bind("127.0.0.1", 0, 0)
    server = uvicorn.Server(uvicorn.Config(build(Local(), QUESTION, "127.0.0.1"), log_level="error", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[made])), daemon=True)
    thread.start()
    yield hosts.address(made, "127.0.0.1")
    server.should_exit = True
    thread.join(10)
    made.close()


@pytest.fixture(scope="module")
def tab():
    with browser.Browser() as found:
        yield found


@pytest.fixture
def page(tab, url):
    """The page with its first answer, wide and light; whatever it complained about fails the test."""
    tab.messages.clear()
    tab.open(url, 1400, 900)
    tab.until(SETTLED)
    yield tab
    assert tab.messages == []


def value(tab, name):
    return tab.run(f"document.getElementById('{name}').value")


def test_the_page_opens_with_the_question_it_was_started_with_and_answers_it(page):
    assert value(page, "f-model") == "llama3-8b" and value(page, "f-plan") == QUESTION["plan"]
    assert page.run("document.querySelector('.tile.main .big').textContent").endswith((" s", " ms"))
    assert page.run("document.title").endswith("llama3-8b on 8xh100 · Meshwright")


def test_a_slider_moves_by_keys_to_legal_plans_only_and_back_to_the_plan_it_came_from(page):
    before = page.run("Meshwright.state.asked.plan")
    page.run("document.getElementById('c-pp').focus()")
    page.press("ArrowRight")
    page.until("Meshwright.state.asked.plan.includes('pp4')")
    page.until("document.querySelector('[data-slider=pp] output').textContent === '4'")
    assert page.run("document.activeElement.id") == "c-pp" and page.run(VERDICT)
    page.press("ArrowLeft")
    page.until(f"!Meshwright.state.asked.plan.includes('pp4') && {VERDICT}")
    after = page.run("Meshwright.state.asked.plan")
    assert sorted(after.split()) == sorted([*before.split(), "interleaved", "mb1"])  # the same plan, in full


def test_an_error_stands_at_its_field_and_the_nearest_legal_plan_is_a_button(page):
    page.run("const f = document.getElementById('f-plan'); f.focus(); f.select()")
    page.type("tp3 pp2")
    page.until("document.querySelector('.errors li')")
    assert page.run("document.getElementById('c-tp').getAttribute('aria-invalid')") == "true"
    assert "does not divide num_heads=32" in page.run("document.getElementById('e-tp').textContent")
    page.run("document.querySelector('.remedies button').focus()")
    page.press("Enter")
    page.until(f"{VERDICT} && !document.querySelector('.errors')")
    assert value(page, "f-plan").startswith("tp4")  # 4/3 is nearer to 1 than 3/2


def test_the_address_holds_the_whole_question_and_opening_it_restores_it(page, url):
    page.run("const f = document.getElementById('f-train'); f.focus(); f.select()")
    page.type("batch=32,seq=1024,dtype=fp16")
    page.until("location.hash.includes('fp16')")
    page.run("Meshwright.state.write({ config: '{\"é\": 1}', tries: ['zero-bubble'] })")
    link = page.run("Meshwright.state.address()")
    page.open(f"{url}{link}", 1400, 900)
    page.until("Meshwright.state.asked.train === 'batch=32,seq=1024,dtype=fp16'")
    asked = page.run("Meshwright.state.asked")
    assert (asked["config"], asked["tries"], asked["plan"]) == ('{"é": 1}', ["zero-bubble"], QUESTION["plan"])


def test_tabs_and_the_timeline_work_with_arrow_keys(page):
    page.run("document.getElementById('t-time').focus()")
    page.press("ArrowRight")
    page.until("document.querySelector('[data-panel=memory] canvas').width > 300")
    page.press("ArrowRight")
    page.until("document.querySelector('[data-panel=step] figure').meshwright")
    page.run("document.querySelector('[data-panel=step] canvas[tabindex]').focus()")
    page.press("ArrowRight")
    assert "Starts at" in page.run("document.querySelector('[data-panel=step] [data-part=live]').textContent")


def test_a_recipe_is_switched_on_and_off_with_the_space_bar(page):
    page.run("document.getElementById('t-recipes').click()")
    page.until("document.querySelector('[data-recipe=gpipe]')")
    page.run("document.querySelector('[data-recipe=gpipe]').focus()")
    page.press(" ")
    page.until("document.querySelector('.tried p').textContent.startsWith('With gpipe')")
    page.until("document.querySelector('[data-recipe=gpipe]').checked && document.activeElement.dataset.recipe")
    page.press(" ")
    page.until("!document.querySelector('.tried')")


@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1400, True)])
def test_nothing_is_wider_than_the_window_and_the_theme_is_the_system_s(tab, url, width, dark):
    tab.open(url, width, 900, dark=dark)
    tab.until(SETTLED)
    for name in ("memory", "step", "layers", "basis", "time"):
        tab.run(f"document.getElementById('t-{name}').click()")
        tab.until(f"document.querySelector('[data-panel={name}] section')")
        assert tab.run("document.documentElement.scrollWidth") <= width, name
    red = tab.run("parseInt(getComputedStyle(document.body).backgroundColor.slice(4))")
    assert (red < 64) is dark
    tab.run("document.querySelector('[data-theme-button]').click()")  # auto, then light
    assert tab.run("parseInt(getComputedStyle(document.body).backgroundColor.slice(4))") > 192
    tab.run("localStorage.clear()")


def test_everything_that_takes_the_focus_has_a_name_and_shows_that_it_has_it(page):
    page.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    focusable = [n for n in nodes if any(p["name"] == "focusable" for p in n.get("properties", []))]
    unnamed = [n["role"]["value"] for n in focusable if not n.get("name", {}).get("value")]
    assert len(focusable) > 40 and set(unnamed) <= {"RootWebArea"}
    page.run("document.activeElement.blur()")
    for _ in range(12):
        page.press("Tab")
        style = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none", page.run("document.activeElement.outerHTML")
