"""The contents of the images."""

import json

import pytest

from quire.version import VERSION
from tests.support.containers import docker

IMAGES = {"worker-cpu": "quire-worker-cpu", "scheduler": "quire-scheduler", "gateway": "quire-gateway"}
CONTENTS = """
import importlib.util, json, pathlib
found = lambda name: importlib.util.find_spec(name) is not None
kernels = pathlib.Path(importlib.util.find_spec("quire_kernels").origin).parent / "cpu" / "libquire_cpu.so"
print(json.dumps({"torch": found("torch"), "pip": found("pip"), "kernels": kernels.exists()}))
"""


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_has_what_its_service_needs_and_no_more(target: str) -> None:
    image = f"{IMAGES[target]}:{VERSION}"
    said = docker("run", "--rm", "--network", "none", "--read-only", "--entrypoint", "python", image, "-c", CONTENTS)
    is_worker = target == "worker-cpu"
    assert json.loads(said) == {"torch": is_worker, "pip": False, "kernels": is_worker}
    (about,) = json.loads(docker("image", "inspect", image))
    assert about["Config"]["User"] == "10001:10001"
    assert about["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert docker("run", "--rm", "--network", "none", image, "--version").strip() == f"quire {VERSION}"
