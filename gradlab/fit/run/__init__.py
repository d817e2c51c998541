"""What only `Trainer.fit` needs: windows of a dataset, checkpoints, signals."""
