"""What can be known to be wrong before any process is started."""

from importlib.util import find_spec

from gateway.auth.keys_file import read_keys
from quire.local.settings import ServeSettings
from quire.model_directory import ModelDirectory, resolve_model
from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.tls import Role, TlsIdentity
from quire.settings import ConfigurationError

# What the services import beyond what a client needs: without them a service would die again and again.
_NEEDED = ("fastapi", "jinja2", "safetensors", "tokenizers", "torch", "uvicorn")


def check(settings: ServeSettings) -> None:
    """Raises ConfigurationError, one line, when these settings cannot be served here."""
    if settings.gateways != 1:
        raise ConfigurationError(f"--gateways {settings.gateways} is not supported yet; use 1")
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"not installed: {', '.join(missing)}; install quire[all]")
    model = ModelDirectory.open(resolve_model(settings.model))
    model.weight_files()
    model.tokenizer_file()
    if settings.tls_dir is not None:
        for role in (Role.GATEWAY, Role.OPERATOR):
            TlsIdentity.of(settings.tls_dir, role)
    for path in settings.keys_files:
        read_keys(path)
    grpc = TcpAddress(settings.grpc_host, settings.grpc_port)
    http = TcpAddress(settings.http_host, settings.http_port)
    if grpc.port and grpc.port == http.port:
        raise ConfigurationError(f"--grpc-port and --http-port are both {grpc.port}; they must differ")
    check_bindable(grpc)
    check_bindable(http)
