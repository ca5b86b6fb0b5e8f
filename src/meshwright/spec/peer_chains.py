"""Peers with runs of a model's layers, through which clients find chains: ``peers=latency:layers=12:lost=2@30s``."""

from __future__ import annotations

import msgspec

from meshwright.spec.serve_values import duration_s

#: What a client looks for in a chain.
FINDS = ("latency", "throughput")


class PeerChains(msgspec.Struct, frozen=True):
    """Peers: what clients ``find`` chains by, the most ``layers`` that each holds (one number for all, one for each, or
    none: as many as fit), and those that are ``lost``, by (peer, seconds from the first arrival)."""

    find: str
    layers: tuple[int, ...] = ()
    lost: tuple[tuple[int, float], ...] = ()

    def most(self, peer: int, fit: int) -> int:
        """Return how many layers a peer holds of as many as `fit`."""
        return min(fit, self.layers[peer if len(self.layers) > 1 else 0]) if self.layers else fit

    def text(self) -> str:
        """Return the form that :func:`peer_chains` reads back."""
        said = [self.find]
        said += ["layers=" + "+".join(map(str, self.layers))] if self.layers else []
        said += ["lost=" + "+".join(f"{peer}@{at_s:.12g}s" for peer, at_s in self.lost)] if self.lost else []
        return ":".join(said)


def peer_chains(text: str) -> PeerChains | None:
    """Read ``latency``, ``throughput:layers=12``, ``latency:layers=16+8+8`` or ``latency:lost=2@30s+4@1m``."""
    find, *options = text.split(":")
    layers, lost = (), []
    for option in options:
        key, _, value = option.partition("=")
        if key == "layers" and not layers:
            counts = value.split("+")
            if not all(count.isdecimal() and len(count) < 6 and int(count) for count in counts):
                return None
            layers = tuple(map(int, counts))
        elif key == "lost" and not lost:
            for one in value.split("+"):
                peer, _, at = one.partition("@")
                seconds = duration_s(at)
                if not peer.isdecimal() or len(peer) > 6 or seconds is None:
                    return None
                lost.append((int(peer), seconds))
        else:
            return None
    if find not in FINDS or len({peer for peer, _ in lost}) < len(lost):
        return None
    return PeerChains(find, layers, tuple(lost))
