"""The live terminal view of a user's runs (``python -m hpc_train top``)."""
