"""Vectors of a graph's nodes, trained by buckets of edges on real processes."""
