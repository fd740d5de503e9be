"""What a run measures of itself while it trains."""
