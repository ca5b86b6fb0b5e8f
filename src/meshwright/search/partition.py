"""Layers onto stages."""


def with_stages(plan, piped, evaluator):
    return plan
