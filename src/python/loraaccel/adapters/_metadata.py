"""Metadata of adapters that tools made: what they invalidate is updated, everything else stays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loraaccel.adapters._entry import Entry

DYNAMIC = "Dynamic"


def resized(
    metadata: Mapping[str, str],
    old: int,
    new: int,
    new_conv: int,
    alpha: float,
    method: str | None,
    param: float,
) -> dict[str, str]:
    """As sd-scripts' resize_lora writes them."""
    comment = metadata.get("ss_training_comment", "")
    if method is None:
        conv = "" if new == new_conv else f" (conv: {new_conv})"
        return {
            **metadata,
            "ss_training_comment": f"dimension is resized from {old} to {new}{conv}; {comment}",
            "ss_network_dim": str(new),
            "ss_network_alpha": str(alpha),
        }
    return {
        **metadata,
        "ss_training_comment": f"Dynamic resize with {method}: {param} from {old}; {comment}",
        "ss_network_dim": DYNAMIC,
        "ss_network_alpha": DYNAMIC,
    }


def network(entries: Iterable[Entry]) -> dict[str, str]:
    """ss_network_dim and ss_network_alpha of entries with a rank: a number, or "Dynamic" where they differ."""
    ranked = [entry for entry in entries if entry.rank]
    if not ranked:
        return {}
    ranks = {entry.rank for entry in ranked}
    alphas = {entry.scale * entry.rank for entry in ranked}
    return {
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else DYNAMIC,
        "ss_network_alpha": str(float(alphas.pop())) if len(alphas) == 1 else DYNAMIC,
    }


def shared(all_metadata: list[Mapping[str, str]]) -> dict[str, str]:
    """What is the same in all of them."""
    first, *others = all_metadata
    return {key: value for key, value in first.items() if all(m.get(key) == value for m in others)}
