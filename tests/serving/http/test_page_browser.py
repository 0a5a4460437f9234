"""The page in headless Chromium: chat, stop, reload, keys, a server that goes and comes back, axe, 320 px."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright.sync_api", reason="pip install 'attar[dev]'")
pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'attar[dev]'")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from attar.serving.http.app import create_app
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import SLOW, FakeBackend, FakeTokenizer
from tests.serving.http.test_compare import folders, serving_two
from tests.serving.http.test_live import running_app, until

__all__ = ["folders"]  # a fixture
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
KEY = "a-key-of-its-own"
HOSTILE = """## Title
Some **bold** and `code`, <img src=x onerror="alert(1)"><script>alert(2)</script>
[good](https://example.com/a) [bad](javascript:alert(3)) ![picture](https://evil.example/x.png)

- one
- two

```python
print("<b>1</b>")
```
"""


class PageBackend(FakeBackend):
    """Waits after the first letter of an answer to a message with the word "slow"."""

    async def submit(self, prompt, params, **options):
        slow = b"slow" in bytes(token for token in prompt if token < 256)
        async for event in super().submit([SLOW, *prompt] if slow else prompt, params, **options):
            yield event


def make_app(answer=HOSTILE, **settings):
    backend, settings = PageBackend(4000, answer), ServerSettings(**{"port": 0, **settings})
    return create_app(backend, settings, tokenizer=FakeTokenizer(), model="tiny"), settings, backend


@pytest.fixture(scope="module")
def served():
    app, settings, backend = make_app(api_key=(KEY,))
    with running_app(app, settings) as (url, _):
        yield url, backend


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def opened(browser, url, key=KEY, **options):
    """The page with its key; afterwards no error and no request elsewhere may have been seen."""
    context = browser.new_context(**options)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda line: line.type in ("error", "warning") and wrong.append(line.text))
    page.on("request", lambda one: one.url.startswith((url, "data:")) or wrong.append(one.url))
    if key:
        context.add_init_script(f"sessionStorage.setItem('attar.key', '{key}')")
    page.goto(url)
    if key:
        says(page, "ready")
    page.wrong = wrong
    yield page
    context.close()
    assert not wrong, wrong


def says(page, text):
    expect(page.locator("#status")).to_have_text(re.compile(text), timeout=60_000)


def send(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def test_a_chat_is_answered_rendered_safely_and_kept(served, browser):
    url, _ = served
    with opened(browser, url) as page:
        expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
        send(page, "hello")
        says(page, "answered")
        answer = page.locator("article.assistant .content")
        expect(answer.locator("strong")).to_have_text("bold")
        expect(answer.locator("pre")).to_have_text('print("<b>1</b>")')
        assert answer.locator("li").count() == 2 and answer.locator("h4").inner_text() == "Title"
        assert [link.get_attribute("href") for link in answer.locator("a").all()] == [
            "https://example.com/a",
            "https://evil.example/x.png",
        ]
        assert (
            answer.locator("img, script").count() == 0 and "<script>alert(2)</script>" in answer.inner_text()
        )
        expect(page.locator(".meta")).to_have_text(re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first after"))
        button(page, "Tokens").click()
        expect(page.locator(".legend", has_text="suffix")).to_be_visible()
        assert page.locator(".token").count() == len(HOSTILE)
        page.press(".tokens", "ArrowRight")
        page.press(".tokens", "ArrowRight")
        expect(page.locator(".detail")).to_have_text(
            re.compile("token 2 of .* proposed by suffix.* probability 61 %")
        )
        page.reload()
        says(page, "ready")
        expect(page.locator("article.assistant strong")).to_have_text("bold")
        assert (
            page.evaluate("Object.keys(localStorage).some(name => localStorage[name].includes('own'))")
            is False
        )


def test_stop_edit_regenerate_and_settings(served, browser):
    url, backend = served
    with opened(browser, url) as page:
        send(page, "slow please")
        expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
        expect(page.locator("article.assistant .content")).to_have_text(re.compile("#"))
        page.get_by_role("button", name="Stop").click()
        says(page, "stopped")
        until(lambda: not backend.open)
        button(page, "Settings").click()
        page.fill("#system", "Be brief.")
        page.fill("#set-temperature", "0.5")
        page.fill("#set-max_tokens", "40")
        page.keyboard.press("Tab")
        button(page, "Edit").click()
        page.fill("article textarea", "again")
        button(page, "Send again").click()
        says(page, "answered")
        prompt, params, _ = backend.asked[-1]
        assert bytes(prompt[1:]).decode() == "system: Be brief.\nuser: again\n"
        assert (params.temperature, params.max_tokens, params.logprobs, params.proposers) == (
            0.5,
            40,
            5,
            True,
        )
        count = len(backend.asked)
        button(page, "Regenerate").click()
        until(lambda: len(backend.asked) == count + 1)
        says(page, "answered")
        assert page.locator("article").count() == 2
        button(page, "New chat").click()
        send(page, "another")
        says(page, "answered")
        expect(page.locator("#chats .open")).to_have_text(["another", "again"])


def test_a_wrong_key_is_asked_for_again(served, browser):
    url, _ = served
    with opened(browser, url, key="") as page:
        says(page, "needs a key")
        expect(page.locator("#key")).to_be_focused()
        for key, reply in (("wrong-key-1", "Incorrect API key"), (KEY, "ready")):
            page.fill("#key", key)
            page.press("#key", "Enter")
            says(page, reply)
        assert page.wrong == [page.wrong[0]] and "401" in page.wrong.pop(), (
            "Chromium reports the answer itself"
        )
        assert page.evaluate("JSON.stringify(localStorage)").find(KEY) < 0


@pytest.mark.slow
def test_a_server_that_goes_and_comes_back(browser):
    page = browser.new_page()
    app, settings, _ = make_app()
    with running_app(app, settings) as (url, _):
        page.goto(url)
        says(page, "ready")
    send(page, "are you there?")
    says(page, "does not answer")
    expect(page.locator(".failed")).to_have_text("The server does not answer.")
    app, settings, _ = make_app(port=int(url.rsplit(":", 1)[1]))
    with running_app(app, settings):
        says(page, "answers again")
        button(page, "Regenerate").click()
        says(page, "answered")
    page.close()


@pytest.mark.slow
def test_two_models_side_by_side(browser, folders):
    with serving_two(folders) as (url, _), opened(browser, url, key="") as page:
        says(page, "ready")
        expect(page.locator("#compare-name")).to_have_text("two")
        button(page, "Settings").click()
        page.fill("#set-max_tokens", "20")
        page.fill("#set-temperature", "0")
        page.keyboard.press("Tab")
        page.check("#compare")
        send(page, "one two three")
        says(page, "answered")
        expect(page.locator(".answer")).to_have_count(2)
        assert page.locator(".answer mark").count() >= 2
        expect(page.locator(".pair")).to_have_text(re.compile(r"second model is \d\.\d+ nats a token away"))
        button(page, "Tokens").click()
        page.get_by_label("What the tokens show").select_option("divergence")
        page.press(".tokens", "ArrowRight")
        expect(page.locator(".detail")).to_have_text(re.compile(r"in the second model, KL \d\.\d{4} nats"))
        assert page.locator(".token").first.evaluate("node => node.style.getPropertyValue('--shade')") != "0"
        assert not [one for one in Axe().run(page).response["violations"] if one["impact"] == "serious"]


@pytest.mark.parametrize(
    "width", [360, *(pytest.param(width, marks=pytest.mark.slow) for width in (860, 1280))]
)
def test_the_end_of_an_answer_stays_in_view_unless_the_reader_leaves_it(browser, width):
    app, settings, backend = make_app("A line of a long answer.\n\n" * 40)
    with (
        running_app(app, settings) as (url, _),
        opened(browser, url, key="", viewport={"width": width, "height": 700}) as page,
    ):
        says(page, "ready")
        send(page, "hello")
        says(page, "answered")
        foot, composer = page.locator("article.assistant .tools"), page.locator("#composer")
        assert in_view(page, foot) and below(foot, composer)
        button(page, "Engine").click()
        assert in_view(page, page.locator("#engine h2"))
        page.wait_for_function("document.querySelector('#log').scrollTop > 0")
        until(lambda: in_view(page, foot) and below(foot, composer))
        send(page, "slow please")
        expect(page.locator("article.assistant .content").last).to_have_text(re.compile("A"))
        page.evaluate("document.querySelector('#log').scrollTop = 100")
        page.evaluate("new Promise(requestAnimationFrame)")
        backend.loop.call_soon_threadsafe(backend.release.set)
        says(page, "answered")
        assert page.evaluate("document.querySelector('#log').scrollTop") == 100


def in_view(page, node):
    box, height = node.bounding_box(), page.viewport_size["height"]
    return box["y"] >= 0 and box["y"] + box["height"] <= height


def below(upper, lower):
    """Whether the first ends above the second."""
    box = upper.bounding_box()
    return box["y"] + box["height"] <= lower.bounding_box()["y"] + 1


def test_an_empty_chat_shows_prompts_and_this_servers_own_call(served, browser):
    url, _ = served
    with opened(browser, url) as page:
        call = page.locator(".empty pre").inner_text()
        assert f"curl {url}/v1/chat/completions" in call and "Bearer YOUR_KEY" in call
        assert json.loads(call.partition("-d '")[2][:-1])["model"] == "tiny"
        example = page.locator(".examples button").last
        example.click()
        expect(page.locator("#prompt")).to_have_value(example.inner_text())
        expect(page.locator("#prompt")).to_be_focused()
        page.press("#prompt", "Enter")
        says(page, "answered")
        assert not page.locator(".empty").count()


def test_colours_are_chosen_and_kept(served, browser):
    url, _ = served
    with opened(browser, url, color_scheme="light") as page:
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        button(page, "Settings").click()
        page.get_by_label("Colours").select_option("dark")
        dark = page.evaluate(paper)
        page.reload()
        assert dark != light and page.evaluate(paper) == dark


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 320), ("light", 1280), pytest.param("dark", 320, marks=pytest.mark.slow)]
)
def test_accessible_narrow_and_wide(served, browser, scheme, width):
    url, _ = served
    with opened(browser, url, color_scheme=scheme, viewport={"width": width, "height": 640}) as page:
        send(page, "hello")
        says(page, "answered")
        for name in ("Chats", "Settings", "Engine", "Tokens"):
            button(page, name).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert not serious, [(one["id"], [node["html"] for node in one["nodes"]]) for one in serious]
