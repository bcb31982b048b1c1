"""TLS of HTTP ports."""

import logging
import ssl
import threading

from quire.rpc.tls import FileWatch, ServerTls, load_certificate
from quire.settings import ConfigurationError

_logger = logging.getLogger(__name__)


class HttpsFiles:
    """Sets each new connection up by the files as they are then; running ones stay as they are."""

    def __init__(self, tls: ServerTls) -> None:
        """Raises ConfigurationError when the files are no good."""
        self._tls = tls
        self._watch = FileWatch(tls.identity)
        self._current = _context(tls)
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """What a server listens with. It stands in for the newest one until a client has said hello."""
        entry = _context(self._tls)
        entry.sni_callback = self._choose
        return entry

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _host: str | None, _entry: ssl.SSLContext) -> None:
        """Called for every client, also for one that names no host, in the thread that has the connection."""
        with self._lock:
            if self._watch.changed() is not None:
                self._renew()
            connection.context = self._current

    def _renew(self) -> None:
        try:
            self._current = _context(self._tls)
        except ConfigurationError as error:  # changed again since they were looked at
            _logger.error("%s; going on with the certificate from before", error)


def _context(tls: ServerTls) -> ssl.SSLContext:
    identity = tls.identity
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        load_certificate(context, identity)
        if identity.authority is not None:
            context.load_verify_locations(identity.authority)
    except OSError as error:  # of which ssl.SSLError is one
        raise ConfigurationError(f"TLS: {identity.certificate} and its like cannot be used: {error}") from error
    if tls.asks_for_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session shows no certificate again, so an authority that has gone would be believed on.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context
