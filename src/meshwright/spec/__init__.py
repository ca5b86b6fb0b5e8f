"""What the user says: model, cluster and workload, immutable and without torch."""
