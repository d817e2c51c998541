"""One Chromium and one JupyterLab for all browser tests of a process, and one page that most of
them share.

A page of JupyterLab takes a processor five seconds to open, and a kernel as many to import
TensorFlow.
"""

import os
import shutil

import pytest
from lab_page import (
    LABS,
    PAGE,
    PREVIEW,
    RUN_ALL,
    SCREENSHOTS,
    SIZE,
    TOY,
    Lab,
    check_log,
    chromium_path,
    close,
    end_kernel,
    frames,
    jupyterlab,
    launch,
    press,
    run_notebook,
    set_setting,
    show_file_browser,
    until,
    write_notebook,
)
from paths import ROOT


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds to the report of a failure what its pages show: a log is all that CI leaves."""
    report = (yield).get_result()
    chromium = getattr(item, "funcargs", {}).get("browser")
    if report.when != "call" or not report.failed or chromium is None:
        return
    for context in chromium.contexts:
        for page in context.pages:
            try:
                shown = page.locator("body").inner_text(timeout=5000)[-3000:]
            except Exception as error:  # of a page that has crashed, or whose browser was killed
                shown = repr(error)
            report.sections.append((f"page {page.url}", shown))


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra dev)"
    )
    if chromium_path() is None:
        # .ci/run installs Chromium and requires these tests; a user's machine may go without.
        if os.environ.get("GRADLAB_NEEDS_BROWSER"):
            pytest.fail("GRADLAB_NEEDS_BROWSER is set, but there is no Chromium on the PATH")
        pytest.skip(
            "no Chromium on the PATH: install the package chromium to run the browser tests"
        )
    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        chromium = launch(playwright)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory):
    """A copy of the notebooks, which JupyterLab may save over, and five notebooks with labs."""
    folder = tmp_path_factory.mktemp("course") / "notebooks"
    shutil.copytree(
        ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "gradlab-*")
    )
    write_notebook(folder / "page.ipynb", *PAGE)
    write_notebook(folder / "labs.ipynb", *LABS)
    write_notebook(folder / "toy.ipynb", *TOY)
    write_notebook(folder / "run_all.ipynb", *RUN_ALL)
    write_notebook(folder / "preview.ipynb", *PREVIEW)
    return folder


@pytest.fixture(scope="session")
def server(browser, notebooks, tmp_path_factory):
    """The address of a JupyterLab with its own temporary settings, on a free port."""
    with jupyterlab(notebooks, tmp_path_factory.mktemp("jupyter")) as address:
        yield address


@pytest.fixture
def whole_notebooks(server):
    """The server, with all cells of a notebook in the page, not only the visible ones."""
    set_setting(server, "notebook-extension:tracker", windowingMode="none")
    yield server
    set_setting(server, "notebook-extension:tracker", windowingMode="contentVisibility")
    set_setting(server, "apputils-extension:themes", theme="JupyterLab Light")


@pytest.fixture(scope="session")
def opened(browser, server):
    """The page that most tests share, run, with both labs stopped."""
    page = run_notebook(browser, server, "page.ipynb", "the kernel is free")
    assert (
        page.locator(
            ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']"
        ).count()
        == 0
    )
    for name in ("small", "whole"):
        lab = Lab(page, f".{name}")
        lab.root.scroll_into_view_if_needed()
        # It trains when it is seen
        until(lambda lab=lab: lab.root.get_attribute("data-state") != "idle")
        lab.press("stop")
    yield page
    close(page)
    end_kernel(server, "page.ipynb")


@pytest.fixture
def page(opened):
    """The page at the size of a laptop's screen, without the file browser. A test may change
    that."""
    opened.set_viewport_size(SIZE)
    show_file_browser(opened, False)
    yield opened
    check_log(opened)


@pytest.fixture
def lab(page):
    """The lab of notebook 00, in its initial state."""
    yield _reset(Lab(page, ".whole"))
    Lab(page, ".whole").press("stop")


@pytest.fixture
def small(page):
    """A lab in the same page whose runs are short, in its initial state."""
    yield _reset(Lab(page, ".small"))
    Lab(page, ".small").press("stop")


def _reset(lab):
    # Whatever a failed test left
    lab.root.evaluate("(lab) => Object.assign(lab.style, {display: '', width: ''})")
    lab.root.scroll_into_view_if_needed()
    # The page holds a slider's last value back until the kernel has answered the one before: it
    # would undo the reset.
    until(lambda: _heard(lab), lambda: f"{lab.status()} {lab.text('batch')}")
    if lab.status().startswith("idle"):
        lab.press("pin")
        # Another state, so that the initial one means the reset
        lab.wait_for("there is no run to pin yet")
    # Otherwise the reset would train
    if lab.root.locator(".gradlab-rerun input").is_checked():
        lab.press("rerun", "Space")
    until(lambda: _is_idle_after_reset(lab), lab.status)
    if not lab.root.locator(".gradlab-rerun input").is_checked():
        lab.press("rerun", "Space")
    if lab.root.locator(".gradlab-against select").input_value() != "updates":
        lab.choose("against", "updates")
    for switch in ("slow", "code", "more"):
        if lab.root.locator(f"button.gradlab-{switch}.mod-active").count():
            lab.press(switch)
    lab.root.locator(".gradlab-drawer").wait_for(state="hidden")
    lab.show_more_views(False)
    while count := lab.pinned().count():
        press(lab.pinned().first, "Enter")
        until(lambda: lab.pinned().count() < count)
    return lab


def _is_idle_after_reset(lab) -> bool:
    """Whether a reset leaves the lab idle. One that the kernel heard before it heard of the checkbox
    does not."""
    lab.press("reset")
    frames(lab.page, 20)
    shown = lab.root.get_attribute("data-state")
    return shown == "idle" and lab.status().startswith("idle") and "pin" not in lab.status()


def _heard(lab) -> bool:
    """Whether the kernel has the values of the sliders for k and b, or has refused them."""
    k, b = (
        lab.text(f"{name} .widget-readout") for name in ("accumulation_steps", "microbatch_size")
    )
    return f"{k} × {b} =" in lab.text("batch") or lab.status().startswith("not run")
