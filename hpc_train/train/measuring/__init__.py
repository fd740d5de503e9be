"""Measures what a run reports of itself while it trains."""
