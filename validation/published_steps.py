"""Published training steps predicted, untuned: Megatron-LM (2104.04473, Table 1), Korthikanti et al. (2205.05198,
Table 5) and MegaScale (2402.15627, Table 2), by the one rule of meshwright/papers/checks/steps.py.

Run: python validation/published_steps.py
"""

from __future__ import annotations

from meshwright.papers.checks.steps import all_rows, mean_errors


def main() -> None:
    """Print the table: published and predicted seconds, one row a line, and mean errors."""
    compared = all_rows()
    print(
        f"{'paper':12s}{'model':14s}{'system':14s}{'GPUs':>5s}{'published':>11s}{'predicted':>11s}{'error':>8s}  plan"
    )
    for c in compared:
        row = c.row
        line = f"{row['paper']:12s}{row['model']:14s}{row['system']:14s}{row['gpus']:5d}{row['step_time_s']:10.2f}s"
        print(f"{line}{c.found.step_time_s:10.2f}s{c.error:+8.1%}  {c.plan}")
    for paper, error in mean_errors(compared).items():
        print(f"mean absolute error of {paper}: {error:.1%}")
    print(f"worst: {max(abs(c.error) for c in compared):.1%} of {len(compared)} rows")


if __name__ == "__main__":
    main()
