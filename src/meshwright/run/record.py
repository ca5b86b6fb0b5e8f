"""Recording what a process does, span by span, while it trains."""
