"""Ways to walk a space of plans, one file each: all of it with bounds, a beam, or simulated annealing."""
