"""Notebooks and labs on a page of a real browser: opening, pressing keys, waiting, reading.

Every wait ends as soon as its condition holds. The deadline only ends a test that would wait
forever.

The page replaces its elements while a test looks at them. What is read is therefore read in one
call, and read again (`until`) when the page may not have got there yet; a key is pressed again when
the element was replaced before it heard the key (`press`).
"""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from paths import ROOT

SCREENSHOTS = ROOT / "tests" / "screenshots"
TOKEN = "a-token-for-tests"
DEADLINE = 180  # seconds; a quiet machine needs a few at most
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# No news, and no notebook is saved but by a test: a saved run is trusted, and shows widgets where
# others see pictures.
SETTINGS = {
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "docmanager-extension/plugin": {"autosave": False},
}

# The lab of notebook 00, and one whose runs take a fraction of a second. What is between them keeps
# the former out of sight.
PAGE = (
    "import gradlab\ngradlab.setup(towers=2, seed=0)",
    "small = gradlab.AccumulationLab(updates=60, seeds=2)\nsmall.view.add_class('small')\nsmall",
    "print('\\n' * 99)",
    "whole = gradlab.AccumulationLab()\nwhole.view.add_class('whole')\nwhole",
    "print('the kernel', 'is free')",
)
# A notebook whose last cell runs until the test has seen the lab train.
RUN_ALL = (
    "import gradlab, pathlib, time\ngradlab.setup(seed=0)",
    "lab = gradlab.AccumulationLab(updates=60, seeds=2)\nlab.view.add_class('first')\nlab",
    "print('\\n' * 99)",
    "while not pathlib.Path('seen').exists():\n    time.sleep(0.05)\nprint('the kernel', 'is free')",
)
# A lab that is shown before TensorFlow is set up, which waits for a file.
PREVIEW = (
    "import gradlab, pathlib, time\nfrom gradlab import runtime\n"
    "configure = runtime._configure\n"
    "def waiting(*arguments):\n"
    "    while not pathlib.Path('loaded').exists():\n        time.sleep(0.05)\n"
    "    return configure(*arguments)\n"
    "runtime._configure = waiting",
    "display(gradlab.AccumulationLab(updates=60, seeds=2))\nruntime = gradlab.setup(seed=0)",
)
# A notebook with three small labs: two alike, and one that diverges.
LABS = (
    "import gradlab\ngradlab.setup(seed=0)",
    "one = gradlab.AccumulationLab(updates=60, seeds=2)\none.view.add_class('one')\none",
    "two = gradlab.AccumulationLab(updates=60, seeds=2, seed=7, hide=('toy', "
    "'cost'))\ntwo.view.add_class('two')\ntwo",
    "wild = gradlab.AccumulationLab(optimizer='sgd', learning_rate=1e30, updates=60, hide=('toy', "
    "'cost'))\n"
    "wild.view.add_class('wild')\nwild",
    "print('the kernel', 'is free')",
)
# One lab with all views, whose runs are hardly longer than their start.
TOY = (
    "import gradlab\ngradlab.setup(seed=0)",
    "gradlab.AccumulationLab(updates=5, seeds=1)",
    LABS[-1],
)
SIZE = {"width": 1280, "height": 1300}  # of a page

FRAMES = """(count) => new Promise((done) => {
    const step = () => count-- ? requestAnimationFrame(step) : done();
    step();
})"""
LISTEN = """(element, event) => {
    window.gradlabHeard = false;
    element.addEventListener(event, () => { window.gradlabHeard = true; }, {capture: true, once: true});
}"""
FOCUSED = "(element) => element === document.activeElement"
# The texts of those of the elements that do not fit in their boxes.
CUT = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.innerText)"


def until(condition, explain=lambda: "", seconds: float = DEADLINE) -> float:
    """Wait for a condition, and return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            pytest.fail(f"not within {seconds} s. {explain()}")
        time.sleep(0.05)
    return time.monotonic() - began


def until_up(
    is_up, process: subprocess.Popen, log: pathlib.Path, seconds: float = DEADLINE
) -> None:
    """Wait until a server is up. Fails at once, with what the server printed, when its process has
    ended."""
    until(lambda: is_up() or process.poll() is not None, log.read_text, seconds)
    assert process.poll() is None, (
        f"the server ended with status {process.returncode}. {log.read_text()}"
    )


def frames(page, count: int = 2) -> None:
    """Wait until the page has drawn this many frames: what it does on its own occasion has happened
    then."""
    page.evaluate(FRAMES, count)


def press(target, key: str) -> None:
    """Press a key on an element once. An element that was replaced before it heard the key gets it
    again."""
    from playwright.sync_api import Error

    event = "keyup" if key == "Space" else "keydown"  # a button reacts to Space when it is released

    def heard() -> bool:
        try:
            element = target.element_handle()
            element.evaluate(LISTEN, event)
            element.press(key)
        except Error as error:
            if "not attached" not in str(error):
                raise
            return False
        return target.page.evaluate("window.gradlabHeard")

    until(heard, lambda: f"the key {key} does not reach {target}")


def free_port() -> int:
    """A TCP port that nothing listens on, and that no system gives to a program that asks for any
    port."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def listens(port: int, address: str = "127.0.0.1") -> bool:
    """Whether a program accepts connections on a port."""
    with socket.socket() as probe:
        probe.settimeout(10)
        return probe.connect_ex((address, port)) == 0


def write_notebook(path: pathlib.Path, *sources: str) -> None:
    """Write a notebook of code cells."""
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [
        cell | {"id": f"cell-{number}", "source": source} for number, source in enumerate(sources)
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    path.write_text(
        json.dumps(
            {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        )
    )


def ask(server: str, path: str, method: str = "GET", **content) -> bytes:
    """Call JupyterLab's own interface over HTTP."""
    request = urllib.request.Request(
        f"{server}/{path}", method=method, headers={"Authorization": f"token {TOKEN}"}
    )
    if content:
        request.data = json.dumps(content).encode()
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        return answer.read()


def answers(server: str) -> bool:
    """Whether JupyterLab is up."""
    try:
        ask(server, "api")
    except OSError:
        return False
    return True


def chromium_path() -> str | None:
    """The path of the Chromium on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


def launch(playwright):
    """A Chromium without a window."""
    return playwright.chromium.launch(
        executable_path=chromium_path(), args=FLAGS, timeout=1000 * DEADLINE
    )


@contextlib.contextmanager
def jupyterlab(notebooks: pathlib.Path, home: pathlib.Path):
    """A JupyterLab that serves a folder, with its own settings in an empty folder, on a free port:
    its address."""
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    environment = os.environ | {name: str(home / folder) for name, folder in folders.items()}
    settings = home / "settings" / "@jupyterlab"
    for plugin, values in SETTINGS.items():
        file = settings / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
    ]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={notebooks}"]
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            until_up(lambda: answers(address), process, home / "log")
            yield address
        finally:
            process.terminate()
            process.wait(120)


def set_setting(server: str, plugin: str, **settings) -> None:
    """Change what a user would change in JupyterLab's settings."""
    ask(server, f"lab/api/settings/@jupyterlab/{plugin}", "PUT", raw=json.dumps(settings))


def end_kernel(server: str, notebook: str) -> None:
    """End the kernel of a notebook: it survives the page that started it."""
    for session in json.loads(ask(server, "api/sessions")):
        if session["path"] == notebook:
            ask(server, f"api/sessions/{session['id']}", "DELETE")


def new_page(browser, **settings):
    """A page in a context of its own, on which no wait ends before the deadline."""
    context = browser.new_context(**settings)
    context.set_default_timeout(1000 * DEADLINE)
    context.set_default_navigation_timeout(1000 * DEADLINE)
    return context.new_page()


def open_notebook(browser, server: str, notebook: str, viewport=None):
    """A page with a notebook whose kernel is ready."""
    page = new_page(browser, viewport=viewport or SIZE)
    page.goto(f"{server}/lab/tree/{notebook}?reset&token={TOKEN}")
    page.locator(".jp-StatusBar-Widget", has_text="| Idle").first.wait_for()
    return page


def run_notebook(browser, server: str, notebook: str, ready: str, viewport=None):
    """A page with a notebook that was run until an output shows the text `ready`."""
    page = open_notebook(browser, server, notebook, viewport)
    choose_menu(page, "Run", "Run All Cells")
    page.locator(".jp-OutputArea-output", has_text=ready).first.wait_for()
    assert page.locator(".jupyter-widgets-error-widget").count() == 0
    return page


def choose_menu(page, menu: str, *items: str) -> None:
    """Choose from JupyterLab's menu. A menu that was closed before its item could be clicked is
    opened again."""
    from playwright.sync_api import TimeoutError

    def chosen() -> bool:
        try:
            page.get_by_role("menuitem", name=menu, exact=True).click(timeout=20_000)
            for item in items:
                page.locator(".lm-Menu-item", has_text=item).first.click(timeout=20_000)
        except TimeoutError:
            page.keyboard.press("Escape")
            return False
        return True

    until(chosen, lambda: f"no {' > '.join([menu, *items])}")


def show_file_browser(page, shown: bool) -> None:
    """Show or hide JupyterLab's file browser."""
    files = page.locator(".jp-DirListing")

    def done() -> bool:
        if files.first.is_visible() == shown:
            return True
        page.keyboard.press("Control+b")
        frames(page)
        return files.first.is_visible() == shown

    files.first.wait_for(state="attached")
    until(done)


def check_log(page) -> None:
    """Fail if a thread or a callback failed or printed: only the log console shows that."""
    if page.locator(".jp-LogConsoleStatusItem.lm-mod-hidden").count() != 1:
        page.locator(".jp-LogConsoleStatusItem").click()
        said = page.locator(".jp-LogConsolePanel")
        said.wait_for()
        raise AssertionError(f"JupyterLab's log console has news: {said.inner_text()}")


def close(page) -> None:
    """Close the page, and fail if its log console has news."""
    check_log(page)
    page.context.close()


class Lab:
    """A lab on the page. Parts are found by the CSS classes of its widgets, never by their
    labels."""

    def __init__(self, page, root=".gradlab-lab"):
        self.page, self.root = page, page.locator(root).first

    def status(self) -> str:
        return self.root.locator(".gradlab-status [role=status]").inner_text()

    def text(self, name: str) -> str:
        return self.root.locator(f".gradlab-{name}").inner_text()

    def words(self, view: str) -> str:
        """The text alternative of a view."""
        return self.root.locator(f".gradlab-words-{view}").inner_text()

    def control(self, name: str):
        return self.seen(
            self.root.locator(f".gradlab-{name}").locator("[role=slider], select, input").first
        )

    def seen(self, target):
        """A part of the lab, after opening what it may wait behind."""
        target.wait_for(state="attached")
        if not target.is_visible():
            # Otherwise it is being opened
            if not self.root.locator("button.gradlab-more.mod-active").count():
                press(self.root.locator("button.gradlab-more"), "Enter")
            target.wait_for()
        return target

    def press(self, name: str, key: str = "Enter") -> None:
        """Press a key on a button or a control: nothing here uses the mouse."""
        # `count` does not wait
        self.root.locator(f".gradlab-{name}").first.wait_for(state="attached")
        button = self.root.locator(f"button.gradlab-{name}")
        press(self.seen(button) if button.count() else self.control(name), key)

    def show_more_views(self, shown: bool = True) -> None:
        """Show all views, or only the first ones."""
        button = self.root.locator("button.gradlab-more-views")
        if (button.get_attribute("aria-expanded") == "true") != shown:
            press(button, "Enter")

    def choose(self, name: str, option: str) -> None:
        """Choose from a list by keyboard: its first letter, again and again, goes from name to
        name."""

        def chosen() -> bool:
            return self.control(name).locator("option:checked").inner_text() == option

        def typed() -> bool:
            press(self.control(name), option[0])
            if not chosen():
                # A list takes two different letters within a second for the beginning of one name.
                self.page.wait_for_timeout(1100)
            return chosen()

        until(lambda: chosen() or typed())

    def set_budget(self, updates: int) -> None:
        """Type the length of a run."""
        self.control("budget").fill(str(updates))
        self.press("budget")

    def pixels(self, view: str) -> str:
        """A view as drawn, pixel by pixel."""
        return self.root.locator(f".gradlab-view-{view} canvas").evaluate(
            "(canvas) => canvas.toDataURL()"
        )

    def computed(self, part: str, *names: str) -> list[str]:
        """Computed styles of a part, read in one call: the page may replace the part between
        two."""
        return self.root.evaluate(
            """(lab, [part, names]) => {
                const style = getComputedStyle(lab.querySelector(part));
                return names.map((name) => style[name]);
            }""",
            [part, names],
        )

    def pinned(self):
        """The buttons that remove the pinned runs."""
        return self.root.locator("button.gradlab-remove")

    def wait_for(self, word: str) -> None:
        """Wait until the status line contains a word."""

        def says() -> bool:
            self.root.scroll_into_view_if_needed()  # a lab that is not seen asks for no news
            return word in self.status()

        until(says, self.status)


def use_by_keyboard(lab: Lab) -> None:
    """Reach every control with Tab, and use a slider, a list, a checkbox and buttons, in any page
    that shows a lab."""
    lab.control("method")  # with everything shown
    named = lab.root.locator("[data-control]:visible, button:visible:enabled")
    names = "(all) => all.map((each) => each.dataset.control ?? each.className)"
    until(
        lambda: (
            {"accumulation_steps", "method", "rerun", "budget"} <= set(named.evaluate_all(names))
        )
    )
    until(
        lambda: not not_reached(lab, set(named.evaluate_all(names))),
        lambda: f"{named.evaluate_all(names)}",
    )

    lab.press("rerun", "Space")
    until(lambda: not lab.control("rerun").is_checked())
    before = lab.text("batch")
    lab.press("accumulation_steps", "ArrowRight")
    until(lambda: lab.text("batch") != before)
    lab.choose("method", "variables")
    lab.press("run", "Space")
    until(lambda: "seed 0" in lab.status(), lab.status)
    lab.press("stop")
    # It may end before the key comes
    until(lambda: lab.status().startswith(("stopped", "finished")), lab.status)
    lab.press("pin")
    until(lambda: lab.pinned().count() == 1)
    lab.press("more", "Space")
    lab.root.locator(".gradlab-drawer").wait_for(state="hidden")


def not_reached(lab: Lab, wanted: set[str]) -> set[str]:
    """Those of the lab's parts that Tab does not reach from its first control."""
    reached = set()
    lab.control("accumulation_steps").focus()
    for _ in range(100):
        now = lab.root.evaluate(
            """(lab) => {
                const focused = document.activeElement;
                const control = focused.closest("[data-control]")?.dataset.control;
                return lab.contains(focused) ? [focused.className, control] : null;
            }"""
        )
        if now is None:
            break
        reached |= set(now)
        lab.page.keyboard.press("Tab")
    return wanted - reached
