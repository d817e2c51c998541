"""The releases that are audited: those of today, and pairs of releases around a public report."""

from typing import NamedTuple

TORCH = ("torch==2.13.0",)
OLD_HF = (*TORCH, "setuptools<80")
FASTAI = (*TORCH, "fastcore==1.3.13", "fastprogress==1.0.0", "setuptools<80")
KERAS = ("tensorflow-cpu==2.16.2", "numpy<2")  # for releases of 2024


class Release(NamedTuple):
    """A release of a library.

    Attributes:
        library: its name on the package index; gradlab itself is that of this checkout.
        version: the release.
        adapter: the module with the adapter, in gradlab.auditing.adapters or in this package.
        packages: what is installed beside it.
        report: for a pair of releases, the public report of the bug.
        reported: what the report says, in a few words.
    """

    library: str
    version: str
    adapter: str
    packages: tuple[str, ...] = ()
    report: str = ""
    reported: str = ""


TODAY = (
    Release("gradlab", "0.2.0", "microbatched"),
    Release("gradlab", "0.2.0", "trainer"),
    Release("keras", "3.15.1", "keras_option", ("tensorflow-cpu==2.21.0",)),
    Release("torch", "2.13.0", "torch_loop"),
    Release("accelerate", "1.15.0", "accelerate", TORCH),
    Release("transformers", "5.23.0", "transformers", (*TORCH, "accelerate==1.15.0")),
    Release("lightning", "2.6.6", "lightning", TORCH),
    Release("deepspeed", "0.19.8", "deepspeed", TORCH),
    Release("optax", "0.2.8", "optax_multisteps"),
    Release("optax", "0.2.8", "optax_microbatching"),
    Release("jax", "0.10.2", "jax_scan", ("optax==0.2.8",)),
)

_KERAS = "https://github.com/keras-team/keras/issues/19990"
_TOKENS = "https://github.com/huggingface/transformers/pull/34191"
_EPOCHS = "https://github.com/huggingface/transformers/pull/24415"
_SUM = "https://github.com/fastai/fastai/issues/3023"
_ZERO = "https://github.com/deepspeedai/DeepSpeed/issues/7718"
_PIPELINE = "https://github.com/deepspeedai/DeepSpeed/issues/7773"
_SMALL = "ZeRO-2's gradients are too small"
_SUMMED = "a pipeline sums where it should average"
_CACHED = "https://github.com/huggingface/sentence-transformers/pull/3862"
_MARGIN = "a margin loss keeps the last mini-batch's gradient only"
_PROMPT = "the second pass sees another mask"
HISTORY = (
    Release(
        "keras", "3.4.1", "keras_option", KERAS, _KERAS, "decay and Adam's count per micro-batch"
    ),
    Release(
        "keras", "3.5.0", "keras_option", KERAS, _KERAS, "decay and Adam's count per micro-batch"
    ),
    Release(
        "transformers",
        "4.45.2",
        "transformers",
        (*TORCH, "accelerate==1.0.1"),
        _TOKENS,
        "a mean of token means",
    ),
    Release(
        "transformers",
        "4.46.3",
        "transformers",
        (*TORCH, "accelerate==1.1.1"),
        _TOKENS,
        "a mean of token means",
    ),
    Release(
        "transformers",
        "4.48.3",
        "transformers",
        (*TORCH, "accelerate==1.3.0"),
        _TOKENS,
        "a mean of token means",
    ),
    Release(
        "transformers",
        "4.30.2",
        "transformers",
        (*OLD_HF, "accelerate==0.20.3"),
        _EPOCHS,
        "tails and epochs",
    ),
    Release(
        "transformers",
        "4.31.0",
        "transformers",
        (*TORCH, "accelerate==0.21.0"),
        _EPOCHS,
        "tails and epochs",
    ),
    Release("fastai", "2.1.7", "fastai_callback", FASTAI, _SUM, "a sum instead of a mean"),
    Release("fastai", "2.1.8", "fastai_callback", FASTAI, _SUM, "a sum instead of a mean"),
    *(
        Release("deepspeed", version, adapter, OLD_HF, report, reported)
        for adapter, report, reported in (
            ("deepspeed_zero2", _ZERO, _SMALL),
            ("deepspeed_pipeline", _PIPELINE, _SUMMED),
        )
        for version in ("0.17.5", "0.18.2", "0.18.4")
    ),
    *(
        Release("sentence-transformers", version, adapter, TORCH, _CACHED, reported)
        for adapter, reported in (
            ("sentence_transformers_margin", _MARGIN),
            ("sentence_transformers_cached", _PROMPT),
        )
        for version in ("5.6.1", "5.7.0")
    ),
)
