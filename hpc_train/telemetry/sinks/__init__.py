"""Sends the metrics of a run to trackers such as W&B, behind one interface (see ``tracker.py``)."""
