"""Evaluates a checkpoint of a run on any validation data and under any layout."""
