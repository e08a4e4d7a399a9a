"""The console's pages in a real browser, at two sizes, over a cluster under load with a broker killed and a move.

Held for each page: it is drawn, has no finding of axe-core, no error or violation of its policy in the browser's log,
is not wider than the screen, and nothing that records, keys, headers or groups hold was ever run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.browser import Browser
from tests.support.console_world import HOSTILE, HOSTILE_GROUP, ConsoleWorld, console_world
from tests.support.raw_produce import UNREADABLE, write_batch
from tidelog.batch.batch import build_batch

pytestmark = [pytest.mark.long, pytest.mark.slow]

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
KILLED = 3
READY = "document.querySelector('h1') && !document.querySelector('[aria-busy]')"
GROUP = quote(HOSTILE_GROUP, safe="")
PAGES = {
    "cluster": ("#/", f"document.querySelector('[aria-label=\"Broker {KILLED}\"]')", "Dead"),
    "topics": ("#/topics", "document.querySelectorAll('tbody tr').length >= 4", "orders"),
    "topic": ("#/topics/orders", "document.querySelectorAll('tbody tr').length === 12", "retention.ms"),
    "partition": ("#/topics/orders/0", "document.querySelector('.lane')", "High watermark"),
    "groups": ("#/groups", "document.querySelectorAll('tbody tr').length >= 1", HOSTILE_GROUP),
    "group": (f"#/groups/{GROUP}", "document.querySelectorAll('tbody tr').length >= 18", HOSTILE_GROUP),
    "records": ("#/records?topic=orders", "document.querySelectorAll('.record').length > 50", "Write one record"),
    "record": ("#/topics/orders/0/5", "document.querySelectorAll('.way li').length >= 8", "WAL written"),
    "slow": ("#/slow", "document.querySelectorAll('.spent').length > 20", "tidelog explain --slow"),
    "moves": ("#/events", "document.querySelectorAll('.events li').length >= 3", f"Broker {KILLED}"),
    "balance": ("#/balance", "document.querySelectorAll('tbody tr').length >= 3", "Brokers wanted"),
    "bucket": ("#/bucket", "document.querySelectorAll('tbody tr').length >= 4", "By purpose"),
}
"""Page → address, when it is drawn, and a text that it shows."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as started:
        started.wait_history(30)
        for partition in range(4):
            started.move("orders", partition, 2)
        started.move("clicks", 0, KILLED)
        started.kill(KILLED)
        yield started


def sign_in(browser: Browser, world: ConsoleWorld, width: int, height: int) -> None:
    browser.open(world.url(), width, height)
    browser.wait("document.querySelector('#token')", "the page asks for the token")
    browser.run("document.querySelector('#token').value = arguments[0]", world.token)
    browser.run("document.querySelector('form').requestSubmit()")
    browser.wait(f"document.querySelector('nav [data-page]') && {READY}", "the first page is drawn")


@pytest.fixture(scope="module", params=list(SIZES))
def browser(
    request: pytest.FixtureRequest, browser_tools: Path, world: ConsoleWorld
) -> Iterator[tuple[Browser, ConsoleWorld]]:
    width, height = SIZES[request.param]
    with Browser(browser_tools, dark=request.param == "phone") as opened:
        sign_in(opened, world, width, height)
        opened.complaints()  # the first request is answered with 401
        yield opened, world


def go(browser: Browser, page: str) -> None:
    address, drawn, _ = PAGES[page]
    browser.run("location.hash = arguments[0]", address)
    browser.wait(f"{READY} && {drawn}", f"{page} is drawn", 60)


@pytest.mark.parametrize("page", list(PAGES))
def test_a_page_is_drawn_readable_and_runs_nothing_of_the_data(
    browser: tuple[Browser, ConsoleWorld], page: str
) -> None:
    opened, _ = browser
    go(opened, page)
    assert PAGES[page][2] in opened.text()
    assert opened.axe() == []
    assert opened.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert "owned" not in opened.run("return document.title").replace(HOSTILE, "")
    assert opened.run("return document.querySelectorAll('main img, main script, main iframe').length") == 0
    assert opened.complaints() == []


def test_hostile_records_are_text(browser: tuple[Browser, ConsoleWorld]) -> None:
    opened, _ = browser
    opened.run("location.hash = '#/records?topic=orders'")
    opened.wait(f"{READY} && document.querySelector('#contains')", "the form is drawn")
    opened.run(
        "document.querySelector('#start').value = 'beginning'; document.querySelector('#contains').value = 'onerror';"
        "document.querySelector('form').requestSubmit()"
    )
    opened.wait("[...document.querySelectorAll('.record pre')].length > 0", "hostile records are found", 90)
    opened.wait("/read/.test(document.querySelector('p[role=status]').innerText)", "the search has ended", 90)
    assert opened.run("return document.querySelector('.record pre').textContent") == HOSTILE
    assert opened.run("return document.querySelector('.record .small code').textContent") == HOSTILE
    opened.run("document.querySelectorAll('.record details').forEach((each) => each.open = true)")
    assert opened.axe() == []
    assert opened.run("return document.querySelectorAll('main img, main script').length") == 0
    assert opened.run("return document.title") != "owned"


def test_a_live_tail_shows_new_records_until_it_is_stopped(browser: tuple[Browser, ConsoleWorld]) -> None:
    opened, _ = browser
    opened.run("location.hash = '#/topics'")
    opened.run("location.hash = '#/records?topic=orders&start=follow'")
    opened.wait("document.querySelectorAll('.record').length > 20", "new records come", 60)
    opened.run("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Stop').click()")
    opened.wait("/^Stopped/.test(document.querySelector('p[role=status]').innerText)", "the tail has stopped")


def test_a_live_tail_shows_what_ends_it_and_records_with_unreadable_headers(
    browser: tuple[Browser, ConsoleWorld], request: pytest.FixtureRequest
) -> None:
    opened, world = browser
    topic = f"passing-{request.node.callspec.id}"
    bootstrap = world.cluster.bootstrap
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(60)
    write_batch(bootstrap, topic, build_batch([UNREADABLE]))
    opened.run("location.hash = arguments[0]", f"#/records?topic={topic}&start=beginning")
    opened.wait("/the name of one is no UTF-8/.test(document.querySelector('.record')?.innerText)", "it is shown", 60)
    opened.run("location.hash = arguments[0]", f"#/records?topic={topic}&start=follow")
    opened.wait("/Stop/.test(document.querySelector('main').innerText)", "the tail has begun", 60)
    admin.delete_topics([topic])[topic].result(60)
    opened.wait("document.querySelector('[role=alert]')", "the error is shown", 60)
    assert topic in opened.run("return document.querySelector('[role=alert]').innerText")
    assert opened.axe() == []


def test_a_record_leads_to_the_way_that_it_went(browser: tuple[Browser, ConsoleWorld]) -> None:
    opened, _ = browser
    opened.run("location.hash = '#/topics'")  # the same address twice would search only once
    go(opened, "records")
    opened.run("document.querySelector('.record a[aria-label^=\"Where did it go\"]').click()")
    opened.wait(f"{READY} && document.querySelector('.way li')", "its way is drawn")
    assert opened.run("return document.querySelector('.cli code').innerText").startswith("tidelog explain orders:")
    go(opened, "partition")
    opened.run("document.querySelector('#explained').value = '7'; document.querySelector('form').requestSubmit()")
    opened.wait(f"{READY} && document.querySelector('.way li')", "the way of the one that was asked for is drawn")
    assert opened.run("return document.querySelector('h1').innerText") == "orders:0@7"
    opened.run("location.hash = '#/topics/orders/0/9000000000000000000'")
    opened.wait("/not written yet/.test(document.body.innerText)", "an offset that does not exist yet is told as such")


def test_slow_requests_are_narrowed_and_sorted(browser: tuple[Browser, ConsoleWorld]) -> None:
    opened, _ = browser
    go(opened, "slow")
    choose = (
        "const each = document.querySelector(arguments[0]); each.value = arguments[1];"
        "each.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    kinds = "[...document.querySelectorAll('[data-key=slow] tbody tr')].map((each) => each.innerText.split(/\\s/)[0])"
    opened.run(choose, "#kind", "Produce")
    opened.wait(f"{kinds}.length > 5 && {kinds}.every((each) => each === 'Produce')", "only Produce is shown")
    opened.run(choose, "#order", "sync")
    opened.run(choose, "#topic", "payments")
    opened.wait("/--api Produce --topic payments/.test(document.querySelector('.cli code').innerText)", "the command")
    opened.wait("document.querySelector('[data-key=slow] tbody a').innerText.startsWith('payments:')", "one topic")
    assert opened.axe() == []
    opened.run(choose, "#topic", HOSTILE)
    opened.wait("document.querySelector('[data-key=slow] .empty')", "a topic without requests is told as such")
    opened.run(choose, "#topic", "")
    opened.run(choose, "#kind", "")
    opened.wait(f"new Set({kinds}).size > 1", "all kinds are shown again")
    assert opened.complaints() == []


def test_everything_is_reached_by_keyboard(browser: tuple[Browser, ConsoleWorld]) -> None:
    opened, _ = browser
    go(opened, "topics")
    opened.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    reached = []
    for _ in range(40):
        opened.press("\ue004")
        reached.append(str(opened.run("return document.activeElement.innerText || document.activeElement.id")))
    assert reached[0] == "Skip to the page"
    assert {"Cluster", "Records", "Bucket", "find", "orders"} <= set(reached)
    visible = opened.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert visible == "solid"


def test_a_page_that_is_drawn_anew_keeps_what_is_typed_and_focused(browser: tuple[Browser, ConsoleWorld]) -> None:
    opened, _ = browser
    go(opened, "topics")
    opened.run("const each = document.querySelector('#find'); each.focus(); each.value = 'pay'; "
               "each.dispatchEvent(new Event('input', {bubbles: true})); window.kept = each")  # fmt: skip
    opened.wait("document.querySelectorAll('tbody tr').length === 1", "the list is filtered")
    assert opened.run("return document.activeElement === window.kept && window.kept.value") == "pay"
    opened.run("const each = document.querySelector('#find'); each.value = ''; each.dispatchEvent(new Event('input'))")


@pytest.mark.parametrize("action", ["Move…", "Reset offsets…", "Drain…", "Change the mode…"])
def test_an_action_shows_its_dry_run_and_its_command_first(browser: tuple[Browser, ConsoleWorld], action: str) -> None:
    opened, _ = browser
    page = {"Move…": "partition", "Reset offsets…": "group"}.get(action, "balance")
    go(opened, page)
    opened.run(
        "[...document.querySelectorAll('button')].find((each) => each.innerText === arguments[0]).click()", action
    )
    opened.wait(
        "document.querySelector('dialog[open] .cli') && !document.querySelector('dialog .skeleton')", "a dry run"
    )
    opened.wait("document.querySelector('dialog').innerText.length > 100", "the dialog says what would happen")
    assert "tidelog" in opened.run("return document.querySelector('dialog .cli code').innerText")
    assert opened.axe() == []
    assert opened.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    opened.press("\ue00c")
    opened.wait("!document.querySelector('dialog')", "Escape closes it")


def test_a_session_that_ended_asks_for_the_token_again(browser_tools: Path, world: ConsoleWorld) -> None:
    with Browser(browser_tools) as opened:
        opened.open(world.url(), 1280, 800)
        opened.wait("document.querySelector('#token')", "the page asks for the token")
        assert opened.axe() == []
        opened.run("document.querySelector('#token').value = 'wrong'; document.querySelector('form').requestSubmit()")
        opened.wait("document.querySelector('[role=alert]')", "a wrong token is said")
        sign_in(opened, world, 1280, 800)
        opened.run("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Sign out').click()")
        opened.wait("document.querySelector('#token')", "it is signed out")


def test_a_page_of_another_origin_gets_nothing(browser_tools: Path, world: ConsoleWorld) -> None:
    """Another port of the same host is the same site: the cookie goes along, and the rules of the API have to hold."""
    with Browser(browser_tools) as opened:
        sign_in(opened, world, 1280, 800)
        opened.open(world.url(2) + "app.js")
        attempt = (
            "const done = arguments[arguments.length - 1];"
            "fetch(arguments[0], {method: arguments[1], credentials: 'include', mode: arguments[2],"
            " headers: arguments[3], body: arguments[1] === 'POST' ? '{}' : undefined})"
            ".then((answer) => done(`${answer.type} ${answer.status}`), (error) => done(`refused ${error.name}`))"
        )
        api = world.url() + "api/"
        for method, path, mode, headers in (
            ("GET", "read/any/status", "cors", {"X-Tidelog-Console": "1"}),
            ("GET", "read/any/status", "cors", {}),
            ("POST", "change/balancer/run", "cors", {"X-Tidelog-Console": "1", "Content-Type": "application/json"}),
            ("POST", "change/balancer/run", "no-cors", {"Content-Type": "text/plain"}),
        ):
            said = opened.run_async(attempt, api + path, method, mode, headers)
            assert said.startswith(("refused", "opaque")), (method, path, said)
