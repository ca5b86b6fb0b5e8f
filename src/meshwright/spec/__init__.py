"""The user's side of a question: model, cluster and workload, immutable and without torch."""
