"""The source of the model that `--model` names: a path, the embedded model, a hub, or an OCI registry."""

from pathlib import Path

from quire.model_files.model_directory import EMBEDDED_MODEL, HubName, ModelDirectory, is_gguf, not_a_directory
from quire.model_files.progress import Report, no_report
from quire.runtime.settings import ConfigurationError

_PACKAGE = Path(__file__).resolve().parents[1]
OCI = "oci://"
"""Names of models in OCI registries begin with it."""
# A wheel carries the model inside the package; a checkout has it next to the package.
_ASSETS = (_PACKAGE / "assets", _PACKAGE.parent / "assets")


def hub_name(name_or_path: str | None) -> HubName | None:
    """The model of a hub that `--model` names; None if it is a path or the embedded model.

    An existing name is a path. A name that begins with ".", "/" or "~", or has no slash, is a path in any case.
    """
    if name_or_path is None or name_or_path == EMBEDDED_MODEL or Path(name_or_path).exists():
        return None
    return HubName.parse(name_or_path)


def resolve_model(name_or_path: str | Path | None, *, with_weights: bool = True, report: Report = no_report) -> Path:
    """The directory of a model: a path, or the name of the embedded model, or the snapshot in the cache of the hub that
    ORG/NAME names or of the registry that oci://HOST/REPOSITORY:TAG names, which is downloaded if it is missing. None
    stands for the embedded model.

    A directory that holds one GGUF file, such as a mounted volume, stands for the file. So does a directory in the
    layout of OCI images.

    Args:
        with_weights: Whether a download includes the weights; without them it has all that a gateway reads.
        report: Called with the progress of a download.

    Raises:
        ConfigurationError: there is no such directory, or no way to have the model.
    """
    if name_or_path is None or (str(name_or_path) == EMBEDDED_MODEL and not Path(name_or_path).is_dir()):
        return _embedded_model()
    if isinstance(name_or_path, str) and (name := hub_name(name_or_path)) is not None:
        return download(name, with_weights=with_weights, report=report)
    if isinstance(name_or_path, str) and name_or_path.startswith(OCI):
        from quire.model_files import oci

        return oci.pull(name_or_path, report)
    try:
        path = Path(name_or_path).expanduser()
    except RuntimeError as error:  # "~" of an unknown user
        raise ConfigurationError(f"model directory {name_or_path} cannot be found: {error}") from error
    if not (path.is_dir() or is_gguf(path)):
        raise not_a_directory(path)
    return _inside(path)


def _inside(path: Path) -> Path:
    """The only GGUF file of a directory without a configuration; else the path itself."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    if (path / "oci-layout").is_file():
        from quire.model_files import oci

        return oci.open_layout(path)
    files = [each for each in path.iterdir() if is_gguf(each)]
    return files[0] if len(files) == 1 else path


def check_local_model(name_or_path: str | None) -> None:
    """Raises ConfigurationError if `--model` names a directory that does not exist or has no supported model. For a
    GGUF file it checks only the existence, since reading takes long; it does not ask a hub or a registry."""
    if hub_name(name_or_path) is None and not (name_or_path or "").startswith(OCI):
        path = resolve_model(name_or_path)
        if not is_gguf(path):
            ModelDirectory.open(path)


def download(name: HubName, *, with_weights: bool = True, report: Report = no_report) -> Path:
    """A model of the hub as `quire.model_files.hub.pull` gives it. Raises ConfigurationError."""
    try:
        # Imported here because it takes a while, and only models of a hub need it.
        from quire.model_files.hub import pull
    except ValueError as error:
        # It reads the address of the hub when it is imported.
        raise ConfigurationError(f"huggingface_hub does not take its variables, HF_ENDPOINT first: {error}") from error
    return pull(name, with_weights=with_weights, report=report)


def _embedded_model() -> Path:
    for assets in _ASSETS:
        if (assets / EMBEDDED_MODEL / "config.json").is_file():
            return assets / EMBEDDED_MODEL
    raise ConfigurationError(f"the embedded model {EMBEDDED_MODEL} is not installed; give a directory by --model")
