"""Checks the Kubernetes manifests: against the flags of the services, and against the schemas of Kubernetes.

usage: python -m tools.check_kubernetes

The schemas come with the package kubernetes-validate. Where kubectl is installed, its kustomize must take the manifests
too.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.settings import ConfigurationError
from tools.kubernetes_manifests import Manifests
from tools.kubernetes_rules import breaches

DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
KUBERNETES_VERSIONS = ("1.30", "1.37")
"""The manifests fit both, and those between."""


def main() -> int:
    """Prints what is wrong; 1 when something is, or the schemas are missing."""
    manifests = Manifests.read(DIRECTORY)
    print(f"{DIRECTORY.name}: {len(manifests.documents)} documents")
    try:
        wrong = [*problems(manifests), *schema_problems(manifests)]
    except ModuleNotFoundError as error:
        wrong = [f"schemas: failed: {error.name} is not installed; `make setup` installs kubernetes-validate"]
    for line in wrong:
        print(line)
    return 0 if is_taken_by_kustomize(manifests) and not wrong else 1


def problems(manifests: Manifests) -> list[str]:
    """What breaks a rule; of a service that would not start, only that."""
    try:
        return breaches(manifests)
    except ConfigurationError as error:
        return [str(error)]


def schema_problems(manifests: Manifests) -> Iterator[str]:
    """What does not fit the schemas of Kubernetes, fields that these do not have included."""
    import kubernetes_validate

    for version in KUBERNETES_VERSIONS:
        for document in manifests.documents:
            name = f"{document['kind']} {document['metadata']['name']}"
            try:
                kubernetes_validate.validate(dict(document), version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(map(str, error.path))
                yield f"{name}: {path or 'document'}: {error.message} (Kubernetes {version})"
            except kubernetes_validate.SchemaNotFoundError as error:
                yield f"{name}: {error.message}"


def is_taken_by_kustomize(manifests: Manifests) -> bool:
    """With empty files in the place of secrets, which lie in no repository. True where there is no kubectl."""
    if shutil.which("kubectl") is None:
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
