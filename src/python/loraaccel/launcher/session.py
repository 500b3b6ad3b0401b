"""One run of a script: what was patched, and at the end what came of it."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

VERIFIED_CALLS = 4  # of each layer; the first with B = 0 shows only the frozen layer


launched: Session | None = None  # the launcher's, in this process


class Layer(NamedTuple):
    """What became of one LoRA module."""

    name: str
    kind: str
    fused: int  # calls that an operator served
    own: int  # calls of the module's own forward
    reasons: dict[str, int]  # of those
    largest_error: float | None  # that verify saw

    @property
    def reason(self) -> str:
        return max(self.reasons, key=lambda r: self.reasons[r]) if self.reasons else "not_called"


class Work(NamedTuple):
    """What became of one thing that the trainer does at each step around the network."""

    work: str
    fused: int  # calls that ours served
    own: int  # calls of the trainer's own method
    reasons: dict[str, int]  # of those
    largest_error: float | None  # that verify saw

    @property
    def line(self) -> str:
        line = f"network: {self.work}, {self.fused} calls"
        if self.own:
            line += "; the trainer's own: " + ", ".join(f"{n} {r}" for r, n in sorted(self.reasons.items()))
        return line


class Session:
    """Collects the LoRA modules of a run. Patches each as it appears."""

    def __init__(self, mode: str, factored: bool = False) -> None:
        self.mode = mode
        self.factored = factored
        self._states: list[tuple[str, Any]] = []  # kind, PatchState
        self._known: set[int] = set()
        self._host_work: Any = None
        self._notes: list[str] = []
        self.used = False  # some network or model was looked at

    def created(self, model: Any) -> None:
        """Patches the LoRA modules in `model`, or `model` itself."""
        from loraaccel import patching

        self.used = True
        verify = VERIFIED_CALLS if self.mode == "verify" else 0
        patched = patching.patch_as_it_comes(model, verify, self.mode != "on", self.factored)
        for entry, state in patched:
            if id(state) not in self._known:
                self._known.add(id(state))
                self._states.append((entry.kind, state))

    def applied(self, network: Any) -> None:
        """Takes over what the trainer does at each step with a network that it has just applied."""
        from loraaccel.integrations import kohya_network, kohya_work

        if self._host_work is None:
            verify = VERIFIED_CALLS if self.mode == "verify" else 0
            self._host_work = kohya_work.HostWork(verify, roll_back=self.mode != "on")
        kohya_network.applied(network, self._host_work)

    def work(self) -> list[Work]:
        records = {} if self._host_work is None else self._host_work.records
        return [
            Work(
                name, record.fused, sum(record.own.values()), dict(record.own),
                record.largest_error if self.mode == "verify" else None,
            )
            for name, record in records.items()
        ]  # fmt: skip

    def imported(self, name: str) -> None:
        """Makes our operators a back end of LyCORIS 4's kernels, where it is the release that is known. (Not when
        comparing: the modules' own forward would run them too.)"""
        if name != "lycoris" or self.mode == "verify" or "lycoris.kernels" not in sys.modules:
            return
        from loraaccel.integrations import lycoris_backend

        try:
            lycoris_backend.register()
            self._notes.append("lycoris: registered as a kernel back end")
        except RuntimeError as error:
            self._notes.append(f"lycoris: {error}")

    def layers(self) -> list[Layer]:
        return [
            Layer(
                state.name, kind, state.fused, sum(state.own.values()), dict(state.own),
                state.largest_error if self.mode == "verify" else None,
            )
            for kind, state in self._states
        ]  # fmt: skip

    @property
    def failed(self) -> list[tuple[str, float]]:
        """What verify gave up, and the error that it saw: layers, and work around the network."""
        everything = [(layer.name, layer) for layer in self.layers()] + [(w.work, w) for w in self.work()]
        return [(name, n.largest_error or 0.0) for name, n in everything if "verify_failed" in n.reasons]

    def lines(self) -> list[str]:
        """For people: a line for each kind, then what verify found."""
        layers = self.layers()
        lines = [] if layers else ["no LoRA modules: the script made none of a kind that loraaccel knows"]
        for kind in sorted({layer.kind for layer in layers}):
            of_kind = [layer for layer in layers if layer.kind == kind]
            fused = [layer for layer in of_kind if layer.fused]
            line = (
                f"{kind}: {len(fused)} of {len(of_kind)} layers fused, {sum(n.fused for n in of_kind)} calls"
            )
            others = Counter(layer.reason for layer in of_kind if not layer.fused)
            if others:
                line += "; not fused: " + ", ".join(f"{n} {reason}" for reason, n in sorted(others.items()))
            calls: Counter[str] = sum((Counter(layer.reasons) for layer in fused), Counter())
            if calls:
                line += "; calls of fused layers' own forward: " + ", ".join(
                    f"{n} {reason}" for reason, n in sorted(calls.items())
                )
            lines.append(line)
        lines += [work.line for work in self.work()]
        if self.mode == "verify":
            lines += self._verify_lines(layers)
        return lines + self._notes

    def _verify_lines(self, layers: list[Layer]) -> list[str]:
        errors = [layer.largest_error for layer in layers if layer.largest_error is not None]
        lines = ["verify: nothing was compared"]
        if errors:
            worst = max(layers, key=lambda layer: layer.largest_error or 0.0)
            lines = [
                f"verify: largest relative error of an output {worst.largest_error:.1e} in {worst.name}, "
                f"middle layer {statistics.median(errors):.1e}"
            ]
            missed = sum(layer.largest_error is None and layer.fused > 0 for layer in layers)
            if missed:
                lines.append(f"verify: {missed} fused layers were never compared")
        lines += [f"verify: {w.work}: largest relative error {w.largest_error:.1e}" for w in self.work()]
        return lines + self._failures()

    def _failures(self) -> list[str]:
        return [f"verify: {name} failed with {error:.1e}" for name, error in self.failed]

    def finish(self, report: Path | None, exit_code: int, everything: bool = True) -> None:
        """Says on standard error what was fused, and writes the file; of several processes all but the first say only
        what verify gave up. Switched off it says nothing. A file that cannot be written is a line more: what the script
        has done, and how it ended, stays what it is."""
        lines = [] if self.mode == "off" else self.lines() if everything else self._failures()
        for line in lines:
            sys.stderr.write(f"loraaccel: {line}\n")
        sys.stderr.flush()
        if report is not None:
            data = {
                "mode": self.mode,
                "exit_code": exit_code,
                "summary": lines,
                "layers": [
                    {**layer._asdict(), "reason": "" if layer.fused else layer.reason}
                    for layer in self.layers()
                ],
                "network": [work._asdict() for work in self.work()],
            }
            try:
                report.write_text(json.dumps(data, indent=1) + "\n")
            except OSError as error:
                sys.stderr.write(f"loraaccel: the report was not written: {error}\n")
