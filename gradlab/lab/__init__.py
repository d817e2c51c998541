"""The bench that the notebooks use: data, models, methods, experiments, plots and the lab, built on the helper."""
