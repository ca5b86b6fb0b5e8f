"""What-ifs from a measured timeline: its task graph is rebuilt, timed as it was, and then as it would be."""
