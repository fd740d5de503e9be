"""The commands that work with checkpoints."""
