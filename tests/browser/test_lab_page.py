"""The checks of the browser tests themselves."""

import pytest
from lab_page import close, end_kernel, run_notebook, write_notebook

pytestmark = pytest.mark.browser

FAILS = """
import ipywidgets
from IPython.display import display
button = ipywidgets.Button(description="fails")
button.add_class("t-fails")
button.on_click(lambda _: 1 / 0)
display(button)
print("the button is there")
"""


def test_an_error_in_a_callback_is_not_overlooked(browser, server, notebooks):
    write_notebook(notebooks / "fails.ipynb", FAILS)
    page = run_notebook(browser, server, "fails.ipynb", "the button is there")
    page.locator(".t-fails").click()
    page.locator(".jp-LogConsoleStatusItem:not(.lm-mod-hidden)").wait_for()
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        close(page)
    page.context.close()
    end_kernel(server, "fails.ipynb")
