"""The ready adapters: those of libraries that are installed are run, and all are short enough for
the docs."""

import importlib

import pytest
import tensorflow as tf
from paths import ROOT

import gradlab
from gradlab.auditing.probes import PROBES

FOLDER = ROOT / "gradlab" / "auditing" / "adapters"
SHARED = {"keras_models", "torch_models", "jax_models"}
CARRIES = {"mean_of_means", "tail_carried", "schedule_per_microbatch"}
# For each adapter: what it must find, and what it cannot train.
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "microbatched": (set(), set()),
    "whole_batch": (set(), {probe.name for probe in PROBES if not probe.needs}),
    "trainer": (set(), set()),
    "tensorflow_loop": (set(), set()),
    "keras_option": (CARRIES, set()),
    "torch_loop": (set(), set()),
    "accelerate": ({"divided_by_k", "mean_of_means"}, set()),
    "transformers": (set(), set()),
    "lightning": ({"divided_by_k", "mean_of_means"}, set()),
    "deepspeed": ({"tail_carried", "mean_of_means"}, set()),
    "optax_multisteps": ({"tail_carried", "mean_of_means"}, set()),
    "optax_microbatching": (set(), {"a short micro-batch"}),
    "jax_scan": (set(), set()),
}
LIBRARIES = {
    "torch_loop": "torch", "accelerate": "accelerate", "transformers": "transformers", "lightning": "lightning",
    "deepspeed": "deepspeed", "optax_multisteps": "optax", "optax_microbatching": "optax", "jax_scan": "optax",
}  # fmt: skip


def test_every_adapter_is_listed_and_shown_in_the_docs():
    found = {path.stem for path in FOLDER.glob("*.py")} - SHARED - {"__init__"}
    assert found == set(EXPECTED)
    page = (ROOT / "docs" / "api" / "auditing.rst").read_text()
    for name in found | SHARED:
        assert f"gradlab/auditing/adapters/{name}.py" in page
        assert name in SHARED or len((FOLDER / f"{name}.py").read_text().splitlines()) < 50


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict_of_an_adapter(name, monkeypatch, two_devices):
    # One per process
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices: two_devices)
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    module = importlib.import_module(f"gradlab.auditing.adapters.{name}")
    audit = gradlab.audit(module.train)
    bugs, skipped = EXPECTED[name]
    assert {finding.bug for finding in audit.findings} == bugs, audit
    left = {probe for probe, reason in audit.skipped.items() if "does not support" not in reason}
    assert left == skipped, audit.skipped
