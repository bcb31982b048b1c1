"""Checks the Kubernetes manifests against the flags of the services, and that kustomize takes them.

usage: python -m tools.check_kubernetes

Without kubectl on this machine, it says that kustomize did not run.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.settings import ConfigurationError
from tools.kubernetes_manifests import Manifests
from tools.kubernetes_rules import breaches

DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"


def main() -> int:
    """Prints what is wrong; 1 when something is."""
    manifests = Manifests.read(DIRECTORY)
    print(f"{DIRECTORY.name}: {len(manifests.documents)} documents")
    wrong = problems(manifests)
    for line in wrong:
        print(line)
    return 0 if is_taken_by_kustomize(manifests) and not wrong else 1


def problems(manifests: Manifests) -> list[str]:
    """Where a service would not start, that alone."""
    try:
        return breaches(manifests)
    except ConfigurationError as error:
        return [str(error)]


def is_taken_by_kustomize(manifests: Manifests) -> bool:
    """With empty files in the place of secrets, which lie in no repository. True where there is no kubectl."""
    if shutil.which("kubectl") is None:
        print("kubectl kustomize: NOT RUN, since this machine has no kubectl")
        return True
    with tempfile.TemporaryDirectory() as copied:
        directory = Path(copied) / DIRECTORY.name
        shutil.copytree(DIRECTORY, directory, ignore=shutil.ignore_patterns("secrets"))
        for secret in manifests.generated("secretGenerator").values():
            for name in secret["files"]:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).touch()
        status = subprocess.run(["kubectl", "kustomize", str(directory)], stdout=subprocess.DEVNULL).returncode
    print("kubectl kustomize: " + ("passed" if status == 0 else "failed"))
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
