"""Graph networks over whole graphs, trained on real processes."""
