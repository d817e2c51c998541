"""microbatch_size="auto": the memory that a training takes, and the largest size that fits. An
update comes in."""
