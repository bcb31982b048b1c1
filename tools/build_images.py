"""Builds the images for CPUs, with the labels of OCI; lists what they contain, and how large they are.

usage: python -m tools.build_images [--out DIR] [TARGET ...]   (default: build/images; gateway scheduler worker-cpu)

It writes NAME.cdx.json for each image, a bill of materials in CycloneDX's form: the packages of Python and of Debian.
PYTHON_IMAGE, TORCH_INDEX_URL and KERNEL_ISAS of the environment are build arguments of the Dockerfile.
"""

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("gateway", "scheduler", "worker-cpu")
_ARGUMENTS = ("PYTHON_IMAGE", "TORCH_INDEX_URL", "KERNEL_ISAS")
# Runs in an image, whose package managers are gone: a line of JSON with the packages, and bytes of Python's packages.
_PACKAGES = """
import importlib.metadata as m, json, pathlib, sysconfig
python = [[d.name, d.version, d.metadata.get("License-Expression")] for d in m.distributions()]
path = pathlib.Path("/var/lib/dpkg/status")
entries = path.read_text().split("\\n\\n") if path.exists() else []
fields = [dict(l.split(": ", 1) for l in e.splitlines() if ": " in l and l[0] != " ") for e in entries]
debian = [[f["Package"], f["Version"], None] for f in fields if " installed" in f.get("Status", "")]
files = (p for p in pathlib.Path(sysconfig.get_path("platlib")).rglob("*") if p.is_file() and not p.is_symlink())
print(json.dumps({"pypi": python, "deb/debian": debian, "bytes": sum(p.stat().st_size for p in files)}))
"""


def main(argv: Sequence[str]) -> int:
    """Raises CalledProcessError where docker fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "images")
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET")
    flags = parser.parse_args(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    lines = ["| image | size | files of Python packages | packages of Python, of Debian |", "|---|---|---|---|"]
    for target in flags.targets:
        image = f"quire-{target}:{VERSION}"
        build(target, image)
        found = json.loads(_docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", _PACKAGES))
        bill = json.dumps(bill_of_materials(image, found), indent=1)
        (flags.out / f"quire-{target}.cdx.json").write_text(bill + "\n", encoding="utf-8")
        size = int(_docker("image", "inspect", "--format", "{{.Size}}", image))
        counts = f"{len(found['pypi'])}, {len(found['deb/debian'])}"
        lines.append(f"| `{image}` | {size / 1e6:,.0f} MB | {found['bytes'] / 1e6:,.0f} MB | {counts} |")
    (flags.out / "sizes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


def build(target: str, image: str) -> None:
    """Builds a target of the Dockerfile. Labels come last, so that they cost no layer of the cache."""
    arguments = [f"--build-arg={name}={os.environ[name]}" for name in _ARGUMENTS if os.environ.get(name)]
    labels = [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels_of_tree().items()]
    subprocess.run(
        ["docker", "build", "--target", target, "--tag", image, *arguments, *labels, "."], cwd=ROOT, check=True
    )


def labels_of_tree() -> Mapping[str, str]:
    """Version, time, and commit and address of the repository if it has them."""
    labels = {"version": VERSION, "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
    for name, command in {"revision": ["rev-parse", "HEAD"], "source": ["remote", "get-url", "origin"]}.items():
        said = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if said.returncode == 0 and "@" not in said.stdout:  # An address may hold a password.
            labels[name] = said.stdout.strip()
    return labels


def bill_of_materials(image: str, packages: Mapping[str, Any]) -> Mapping[str, Any]:
    """CycloneDX 1.6. `packages` has lists of (name, version, license) by type of package URL."""
    components = []
    for kind in ("pypi", "deb/debian"):
        for name, version, license_expression in sorted(packages[kind]):
            normalized = name.lower().replace("_", "-") if kind == "pypi" else name
            url = f"pkg:{kind}/{normalized}@{version}"
            component = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
            if license_expression:
                component["licenses"] = [{"expression": license_expression}]
            components.append(component)
    about = {"type": "container", "name": image.partition(":")[0], "version": VERSION}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"timestamp": labels_of_tree()["created"], "component": about},
        "components": components,
    }


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
