"""What can be known to be wrong before any process is started."""

from importlib.util import find_spec

from gateway.auth.keys_file import read_keys
from quire.local.settings import ServeSettings
from quire.model_directory import ModelDirectory, resolve_model, weight_files
from quire.rpc.tls import Role, TlsIdentity
from quire.settings import ConfigurationError
from quire.tracing import check_installed

# What the services import beyond what a client needs: without them a service would die again and again.
_NEEDED = ("jinja2", "safetensors", "starlette", "tokenizers", "torch", "uvicorn")


def check(settings: ServeSettings) -> None:
    """Raises ConfigurationError, one line, when these settings cannot be served here."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"not installed: {', '.join(missing)}; install quire[all]")
    check_installed(settings.otlp_traces_endpoint)
    model = ModelDirectory.open(resolve_model(settings.model))
    weight_files(model.path)
    model.tokenizer_file()
    if settings.tls_dir is not None:
        TlsIdentity.of(settings.tls_dir, Role.GATEWAY)
    if settings.public_cert is not None and settings.public_key is not None:
        TlsIdentity(settings.public_cert, settings.public_key, None).read()
    for path in settings.keys_files:
        read_keys(path)
    if settings.grpc_port and settings.grpc_port == settings.http_port:
        raise ConfigurationError(f"--grpc-port and --http-port are both {settings.grpc_port}; they must differ")
