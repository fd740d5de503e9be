"""Shows a user's runs live in a terminal (``python -m hpc_train top``)."""
