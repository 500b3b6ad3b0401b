"""PEFT's own tests, plain and with every model patched: the same tests must pass.

    python tests/outside/peft_suite.py PEFT_CHECKOUT [--tests test_custom_models.py ...] [--jobs 2]

PEFT_CHECKOUT: a source tree of PEFT with its tests; its src is used. The interpreter needs loraaccel, what PEFT's tests
need, pytest and pytest-xdist. Nothing is downloaded: tests that need a model hub fail in both runs. The default tests
take a quarter of an hour on two cores. Exit status 1 where a test passes plain and fails patched (run once more alone
before that is said), or an operator was never called.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = (
    "test_custom_models.py", "test_decoder_models.py", "test_mixed.py", "test_hotswap.py", "test_initialization.py",
    "test_lora_variants.py", "test_helpers.py", "test_tuners_utils.py", "test_trainable_tokens.py",
)  # fmt: skip
OPERATORS = (
    "lora_linear",
    "dora_linear",
    "lora_delta",
    "lora_linear_batched",
    "lora_conv2d",
    "lora_embedding",
)


def run(checkout: Path, tests: list[str], jobs: int, out: Path, name: str, patched: bool) -> dict[str, str]:
    """Outcome of every test: passed, failed or skipped."""
    report = out / f"{name}.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",  # tests that ask the hub all the same are refused at once
        "OMP_NUM_THREADS": "1",
    }
    if patched:
        environment["LORAACCEL_JUDGE"] = str(out)
    command = [
        sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "loraaccel_judge", "-q",
        "-n", str(jobs), "-W", "ignore::FutureWarning", "--junitxml", str(report), *tests,
    ]  # fmt: skip
    with (out / f"{name}.log").open("w") as log:
        code = subprocess.run(
            command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code not in (0, 1) or not report.exists():
        sys.exit(f"{name}: pytest stopped with {code}\n{(out / f'{name}.log').read_text()[-2000:]}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag for child in case}
        outcome = (
            "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        )
        path = str(case.get("classname")).replace(".", "/")
        outcomes[f"{path}::{case.get('name')}"] = outcome
    return outcomes


def node_id(name: str) -> str:
    """tests/file/Class::test, as junit has it, to tests/file.py::Class::test."""
    path, _, test = name.partition("::")
    parts = path.split("/")
    file = next(i for i, part in enumerate(parts) if part.startswith("test_"))
    return "::".join(["/".join(parts[: file + 1]) + ".py", *parts[file + 1 :], test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--tests", nargs="+", help="files; those of the list at the top that there are")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    tests = [f"tests/{t}" for t in arguments.tests or TESTS]
    missing = [t for t in tests if not (checkout / t).exists()]
    if missing and (arguments.tests or len(missing) == len(tests)):
        sys.exit(f"{checkout} has no {', '.join(missing)}: expected a source tree of PEFT")
    for test in missing:
        print(f"left out, this version of PEFT has none: {test}")
        tests.remove(test)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        plain = run(checkout, tests, arguments.jobs, out, "plain", patched=False)
        patched = run(checkout, tests, arguments.jobs, out, "patched", patched=True)
        counts = [json.loads(f.read_text()) for f in out.glob("*.json")]
        broken = [t for t, o in plain.items() if o == "passed" and patched.get(t) == "failed"]
        if broken:
            again = [node_id(t) for t in broken]
            plain_again = run(checkout, again, 0, out, "plain-again", patched=False)
            patched_again = run(checkout, again, 0, out, "patched-again", patched=True)
            broken = [t for t, o in plain_again.items() if o == "passed" and patched_again.get(t) == "failed"]
    for name, outcomes in (("plain", plain), ("patched", patched)):
        print(f"{name}: " + ", ".join(f"{n} {o}" for o, n in sorted(Counter(outcomes.values()).items())))
    fused: Counter[str] = sum((Counter(c["fused"]) for c in counts), Counter())
    fallback: Counter[str] = sum((Counter(c["fallback"]) for c in counts), Counter())
    ran: Counter[str] = sum((Counter(c["tests"]) for c in counts), Counter())
    print(f"fused calls, in {ran['fused']} of {ran['all']} tests: {dict(fused)}")
    print(f"calls of PEFT's own forward, by reason: {dict(fallback)}")
    never = [k for k in OPERATORS if not fused[k]] if not arguments.tests else []
    for test in broken:
        print(f"passes plain, fails patched: {test}")
    for kind in never:
        print(f"never called: {kind}")
    sys.exit(bool(broken or never or not fused))


if __name__ == "__main__":
    main()
