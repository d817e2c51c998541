"""Which of Keras' tests are equal under a condition only, and which may differ, with the reasons.

A test is listed by a part of its name, which is file::class::test.
"""

# Their layers draw random numbers, for each micro-batch its own: one micro-batch holds the batch
# here.
ONE_MICROBATCH = (
    *("cut_mix_test", "mix_up_test", "pipeline_test", "rand_augment_test", "solarization_test"),
    *("preprocessing/image_preprocessing/random_", "rnn/dropout_rnn_cell_test"),
    *(
        f"rnn/{name}_test.py::{case}::test_basics"
        for name, case in [("gru", "GRUTest"), ("lstm", "LSTMTest")]
    ),
    *("rnn/simple_rnn_test.py::SimpleRNNTest::test_basics", "rnn/conv_lstm"),
)

# Keras gives their optimizers the rows of an embedding's gradient one by one; here as gradlab does,
# as one gradient.
DENSE_GRADIENTS = (
    "test_clipnorm_indexed_slices",
    "time_distributed_test.py::TimeDistributedTest::test_with_mask_zero",
)

# Their optimizer begins with the model's weights, which Keras' fit loses if it must build the
# model: built before here.
BUILT_BEFORE = ("schedule_free_adamw_test.py::ScheduleFreeAdamWTest::test_with_model",)

# What their layers or models give as one number for a batch, which gradlab must be told.
DECLARED = {
    "src/distillation/": "mean",
    "test_functional_list_outputs_with_custom_compute_loss": "mean",
    "test_compute_loss_no_training_backwards_compatibility": "mean",
    "test_fwd_pass_loss_presence_in_compute_loss": "mean",
    "test_metric_update_in_compute_loss": "mean",
    "test_internal_only_loss": "sum",
    "embedding_test.py::EmbeddingTest::test_ragged": "sum",
}

# The slowest tests, 20 to 65 seconds each, and those of many variants. Only `make test-keras` runs
# them.
LONG = (
    *("StackedRNNTest::test_basics", "test_remat_basic_call", "test_spectrogram_basics"),
    *("conv_lstm1d", "conv_lstm3d", "test_model_checkpoint_options", "test_monitor_op_logic"),
    *("EarlyStoppingTest::test_early_stopping", "_eager", "unrolled_steps"),
)

VALUES = "these gradients are new values, not gradients: gradlab refuses float8 training"
OWN_STEP = "the model has a `train_step` of its own, which gradlab refuses"
ALLOWED = {
    "float8": VALUES,
    "overwrite_with_gradient": VALUES,
    "aug_mix_test": "AugMix chooses its operations with Python's `random` when it is traced",
    "test_retracing": OWN_STEP,
    "test_fit_with_custom_train_step": OWN_STEP,
    "test_fit_sparse": "the test asks that the optimizer gets sparse gradients; gradlab's are "
    "dense",
    "test_for_eval_epoch_iterator": "Keras stops at validation data of another rank, which "
    "gradlab can evaluate",
}


CONDITIONS = (*ONE_MICROBATCH, *DENSE_GRADIENTS, *BUILT_BEFORE, *DECLARED)


def among(name: str, words) -> bool:
    """Whether one of the words is a part of a test's name."""
    return any(word in name for word in words)
