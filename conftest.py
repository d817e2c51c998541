"""What every test and docstring example starts from: three towers on any machine, and repeatable numbers."""

import gradlab

gradlab.setup(towers=3, seed=0)
