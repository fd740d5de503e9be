"""Promotes checkpoints to a model registry, W&B's or MLflow's, and imports them from there."""
