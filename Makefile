# gradlab: `make lab` opens the notebooks, `make test` proves the rest. Both build .venv when it is missing or stale:
# .venv/ready is what the lab needs, .venv/dev what tests, documentation and development need as well.
PYTHON  ?= python3
PORT    ?= 8888
BROWSER ?= yes
HOST    ?= 127.0.0.1
THEME   ?= light
WORKERS ?= 3
CHOICE  ?= -m "not slow"

# A port that was asked for is the port or an error; the usual one moves on when it is taken.
PORT_FLAGS := $(if $(filter file,$(origin PORT)),,--ServerApp.port_retries=0)

.DEFAULT_GOAL := help
.PHONY: help lab app test test-changed test-slow test-keras test-helper test-lowest test-versions test-next types style bench docs linkcheck notebooks lock clean

help:
	@echo "make lab         open the notebooks in JupyterLab; on a server: make lab PORT=9000 BROWSER=no"
	@echo "make app         serve the lab alone, for a classroom: make app HOST=0.0.0.0 lets others in"
	@echo "make test        run the tests, the notebooks and the browser tests; with more cores: make test WORKERS=8"
	@echo "make test-changed  run the tests of the modules that you have changed since the last commit"
	@echo "make test-slow   run the tests that take long: lost workers, kills, memory, notebooks that train, a quarter of Keras' own"
	@echo "make test-keras  run all of Keras' own tests that train, as they are and in micro-batches"
	@echo "make test-helper run the tests of the helper alone, without the lab, the notebooks and the browser; those that"
	@echo "                 take long, too: make test-helper CHOICE="
	@echo "make test-lowest run the helper's tests on the lowest TensorFlow and Keras that gradlab supports"
	@echo "make test-versions  run only those that other versions would break first"
	@echo "make test-next   run the helper's tests on the next TensorFlow and Keras: pre-releases and nightly builds"
	@echo "make style       check the style and the formatting"
	@echo "make types       check the types"
	@echo "make bench       time the methods side by side"
	@echo "make docs        build the site in docs/_build/html; make linkcheck also checks external links"
	@echo "make notebooks   run the notebooks and keep their outputs; only some: make notebooks NOTEBOOKS=..."
	@echo "make lock        renew requirements.txt and requirements-lowest.txt from pyproject.toml"
	@echo "make clean       remove .venv, .venv-lowest and .venv-next"

# JupyterLab refuses to run as root unless told otherwise; containers and servers often do.
LAB_FLAGS := $(if $(filter 0,$(shell id -u)),--allow-root) $(if $(filter no,$(BROWSER)),--no-browser)

lab: .venv/ready
	@echo "gradlab: starting JupyterLab on 127.0.0.1:$(PORT); stop it with Ctrl-C."
	@exec .venv/bin/python -m jupyterlab --ip=127.0.0.1 --port=$(PORT) $(PORT_FLAGS) \
	    --ServerApp.root_dir="$(CURDIR)/notebooks" --LabApp.default_url=/lab/tree/00_start_here.ipynb $(LAB_FLAGS)

app: .venv/ready
	@exec .venv/bin/python -m gradlab.lab.classroom --host $(HOST) --port $(PORT) --theme $(THEME) \
	    $(if $(filter no,$(BROWSER)),--no-browser) $(APP)

# conftest.py says how the tests are divided among the workers. nbval runs the course, and tests/notebooks the solutions.
PYTEST := -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder
NBVAL  := --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg

test: .venv/dev
	.venv/bin/python $(PYTEST) -m "not slow" $(NBVAL) tests notebooks/*.ipynb notebooks/app gradlab

test-changed: .venv/dev
	.venv/bin/python tests/support/changed.py

test-slow: .venv/dev
	.venv/bin/python $(PYTEST) -m slow $(NBVAL) tests notebooks/*.ipynb notebooks/app

test-keras: .venv/dev
	.venv/bin/python tests/keras_suite/suite.py

# Only the helper has this range of versions; the lab runs on the versions of requirements.txt. Other tests of the helper
# need the lab, mypy or several processes.
HELPER_TESTS := $(foreach name,averaging accumulator batch_ramp chunked window static_graph runtime,tests/test_$(name).py) \
    tests/fit tests/measure tests/drawing tests/lab/experiments/test_methods.py

test-helper: .venv/dev
	.venv/bin/python $(PYTEST) $(CHOICE) $(HELPER_TESTS)

# What other versions of Keras and TensorFlow would break first: their private parts, and the update of each kind of model.
VERSION_TESTS := $(foreach name,averaging accumulator window static_graph,tests/test_$(name).py) \
    tests/fit/test_keras_private.py tests/fit/test_microbatched.py tests/fit/losses/test_every_loss.py \
    tests/fit/metrics/test_every_metric.py tests/fit/program/test_compiled_step.py
LOWEST := $(HELPER_TESTS)

# Old versions warn of what the new ones have changed.
test-lowest: .venv-lowest/ready
	.venv-lowest/bin/python $(PYTEST) --override-ini filterwarnings= $(CHOICE) $(LOWEST)

test-versions: ; @$(MAKE) --no-print-directory test-lowest CHOICE= LOWEST="$(VERSION_TESTS)"

# New versions warn of what they will change.
test-next: .venv-next/ready
	.venv-next/bin/python $(PYTEST) --override-ini filterwarnings= $(CHOICE) $(HELPER_TESTS)

# Deno is a linter, formatter and type checker for the lab's JavaScript; its settings are in deno.json.
DENO := DENO_NO_UPDATE_CHECK=1 .venv/bin/deno
JAVASCRIPT := $(wildcard gradlab/lab/widget/*.js gradlab/lab/widget/*/*.js)

style: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(DENO) lint --quiet $(JAVASCRIPT)
	$(DENO) fmt --check --quiet $(JAVASCRIPT)

types: .venv/dev
	.venv/bin/mypy
	$(DENO) check --quiet $(JAVASCRIPT)

bench: .venv/dev
	.venv/bin/python -m benchmarks --write

SPHINX := -m sphinx --fail-on-warning --keep-going --quiet

docs: .venv/dev
	.venv/bin/python $(SPHINX) -b html docs docs/_build/html
	@echo "gradlab: the site is in docs/_build/html/index.html"

linkcheck: .venv/dev
	.venv/bin/python $(SPHINX) -b linkcheck docs docs/_build/linkcheck

# The metadata "jupyter" and "tags" of a cell say whether JupyterLab and the site fold its source.
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb notebooks/*/*.ipynb)

notebooks: .venv/dev
	.venv/bin/python -m jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.store_widget_state=False \
	    --ClearMetadataPreprocessor.enabled=True --ClearMetadataPreprocessor.clear_notebook_metadata=False \
	    --ClearMetadataPreprocessor.preserve_cell_metadata_mask=jupyter \
	    --ClearMetadataPreprocessor.preserve_cell_metadata_mask=tags $(NOTEBOOKS)
	.venv/bin/python tests/support/draw_diagrams.py $(NOTEBOOKS)

# The lab's lock is a part of the whole one, with setuptools, which installs gradlab itself, and uv, which installs the rest.
LOCK := .venv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --upgrade --quiet \
    --no-emit-index-url --custom-compile-command "make lock"
LAB  := --extra lab --extra app --extra cluster

lock: .venv/dev
	$(LOCK) $(LAB) --extra docs --extra dev --output-file requirements-dev.txt
	printf 'setuptools\nuv\n' | $(LOCK) - $(LAB) --constraint requirements-dev.txt --output-file requirements.txt
	$(LOCK) --extra test --resolution lowest-direct --output-file requirements-lowest.txt

clean:
	rm -rf .venv .venv-lowest .venv-next

# uv installs packages faster than pip. It does not read pip's configuration, so where uv cannot install, pip does.
# $(1) is the environment, $(2) the lock file, $(3) an option of uv.
define packages
	@$(1)/bin/python -m uv pip install --quiet --require-hashes -r $(2) $(3) || { \
	    echo "gradlab: uv could not install the packages; trying pip."; \
	    $(1)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(2); }
endef

define environment
	@rm -rf $(1) && $(PYTHON) -m venv $(1)
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.txt > $(1)/uv.txt
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(1)/uv.txt
	$(call packages,$(1),$(2),$(3))
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endef

# The stamp is written last, so an install that was interrupted is done again.
.venv/ready: requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "gradlab: no '$(PYTHON)' found: install Python 3.11 to 3.13, or say make PYTHON=/path/to/python3." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "gradlab: needs Python 3.11 to 3.13, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1): install one of these and say make PYTHON=python3.13." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "gradlab: '$(PYTHON)' has no venv module: install it, on Debian and Ubuntu with apt install python3-venv." >&2; exit 1; }
	@echo "gradlab: making .venv and installing TensorFlow, JupyterLab and the rest (once; a few minutes, 2.8 GB)."
	$(call environment,.venv,requirements.txt,--compile-bytecode)
	@# JupyterLab asks every newcomer about its news; here the first thing to see is the notebook.
	@mkdir -p .venv/share/jupyter/lab/settings
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' \
	    > .venv/share/jupyter/lab/settings/overrides.json
	@touch .venv/ready
	@echo "gradlab: ready."

.venv/dev: .venv/ready requirements-dev.txt
	@echo "gradlab: adding what tests, documentation and development need (once; 0.6 GB)."
	$(call packages,.venv,requirements-dev.txt,--compile-bytecode)
	@touch .venv/dev

.venv-lowest/ready: requirements-lowest.txt pyproject.toml
	@echo "gradlab: making .venv-lowest and installing the lowest supported TensorFlow and Keras (about 2 GB)."
	$(call environment,.venv-lowest,requirements-lowest.txt)
	@touch .venv-lowest/ready

# What users will have next, on Python 3.14, too. The pins of pyproject.toml do not hold here, and nightly builds of Keras
# take its place.
.venv-next/ready: pyproject.toml
	@echo "gradlab: making .venv-next and installing the newest pre-releases of TensorFlow and Keras (about 2 GB)."
	@rm -rf .venv-next && $(PYTHON) -m venv .venv-next
	@.venv-next/bin/python -m pip install --quiet --disable-pip-version-check uv
	@.venv-next/bin/python -m uv pip install --quiet --prerelease allow tensorflow numpy lazy-loader \
	    pytest pytest-timeout pytest-xdist hypothesis scipy setuptools
	@.venv-next/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --ignore-requires-python --editable .
	@# Both packages have the folder keras/, and a pre-release of TensorFlow brings the nightly one.
	@.venv-next/bin/python -m uv pip uninstall --quiet keras keras-nightly
	@.venv-next/bin/python -m uv pip install --quiet --prerelease allow --no-deps keras-nightly
	@.venv-next/bin/python -m uv pip list --quiet | grep -E "^(tensorflow|keras-nightly|numpy) "
	@touch .venv-next/ready
