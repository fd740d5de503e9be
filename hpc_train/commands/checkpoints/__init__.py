"""The commands that work with checkpoints."""

ACTIONS = ("list", "verify", "export", "promote", "import")  # of ``checkpoint``
