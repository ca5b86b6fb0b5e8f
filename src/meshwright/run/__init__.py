"""Executor 2: the plan, for real, with ``torch.distributed``. The only package that imports torch."""
