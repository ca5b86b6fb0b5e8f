"""Slow ranks and links that are injected into simulated steps, and how many of them a diagnosis names rightly.

Run: python -m bench.diagnose [--cases 60] [--seed 0] [--json]

Every case draws a plan, a fault (a rank that computes 1.2 to 3 times as long, a link between pipeline neighbours or all
links of a rank at 1.5 to 5 times) and a factor for every rank from a lognormal of 0.02, which nobody is to be blamed
for. A case is right when its first suspect is the injected one, by kind and rank, and no other is named.
"""

from __future__ import annotations

import argparse
import json
import sys

from meshwright.papers.checks.faults import TARGET, judged


def main() -> None:
    said = argparse.ArgumentParser(prog="python -m bench.diagnose", description=__doc__.splitlines()[0])
    said.add_argument("--cases", type=int, default=60)
    said.add_argument("--seed", type=int, default=0)
    said.add_argument("--json", action="store_true")
    asked = said.parse_args()
    found = judged(asked.cases, asked.seed)
    share = sum(good for _, _, good, _ in found) / len(found)
    if asked.json:
        json.dump({"cases": len(found), "right": share, "wrong": [one for one in found if not one[2]]}, sys.stdout)
        print()
    else:
        for plan, words, good, named in found:
            if not good:
                print(f"wrong: {plan} {words}: {named or 'nothing'}")
        print(f"{share:.1%} of {len(found)} named rightly, {TARGET:.0%} wanted")
    sys.exit(0 if share >= TARGET else 1)


if __name__ == "__main__":
    main()
