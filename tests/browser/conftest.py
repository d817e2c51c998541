"""One Chromium and one JupyterLab for all browser tests of a process, and notebook 00 opened in them."""

import os
import shutil

import pytest
from lab_page import (
    LABS,
    SCREENSHOTS,
    SMALL,
    TOY,
    Lab,
    add_cell,
    chromium_path,
    close,
    end_kernels,
    jupyterlab,
    launch,
    run_notebook,
    set_setting,
    until,
    write_notebook,
)
from paths import ROOT


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    if chromium_path() is None:
        # .ci/run installs Chromium and requires these tests; a user's machine may go without.
        if os.environ.get("GRADLAB_NEEDS_BROWSER"):
            pytest.fail("GRADLAB_NEEDS_BROWSER is set, but there is no Chromium on the PATH")
        pytest.skip("no Chromium on the PATH: install the package chromium to run the browser tests")
    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        chromium = launch(playwright)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory):
    """A copy of the notebooks, which JupyterLab may save over, with one more lab in 00 and two more notebooks."""
    folder = tmp_path_factory.mktemp("course") / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "gradlab-*"))
    add_cell(folder / "00_start_here.ipynb", SMALL)
    write_notebook(folder / "labs.ipynb", *LABS)
    write_notebook(folder / "toy.ipynb", *TOY)
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


@pytest.fixture(scope="module")
def page(browser, server):
    """Notebook 00, opened and run, at a laptop's width."""
    page = run_notebook(browser, server, "00_start_here.ipynb", "test accuracy after 10 updates")
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    page.keyboard.press("Control+b")  # hides the file browser
    yield page
    close(page)
    end_kernels(server)


@pytest.fixture
def lab(page):
    """The first lab of notebook 00, in its initial state."""
    return _reset(Lab(page))


@pytest.fixture
def small(page):
    """A lab in the same page whose runs are short, in its initial state."""
    return _reset(Lab(page, ".small"))


def _reset(lab):
    lab.root.scroll_into_view_if_needed()
    lab.press("reset")
    lab.wait_for("idle")  # every test leaves its lab in another state, so that this word means the reset
    if lab.root.locator("button.gradlab-more.mod-active").count():
        lab.press("more")
        lab.root.locator(".gradlab-drawer").wait_for(state="hidden")
    while count := lab.pinned().count():
        lab.pinned().first.press("Enter")
        until(lambda: lab.pinned().count() < count)
    return lab
