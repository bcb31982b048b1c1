"""The expiry of certificates, read without a library for certificates."""

import datetime as dt
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from quire.rpc.certificates import Authority
from quire.service.metrics import CertificateExpiry, expires_at
from tests.support.certificates import make_certificates


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


def test_times_of_both_types_are_read_and_of_several_certificates_the_first_one_to_expire_counts(
    tmp_path: Path,
) -> None:
    """From 2050 on certificates have the time in another format."""
    now, texts = dt.datetime.now(dt.UTC).replace(microsecond=0), list[str]()
    for days in (30, 3, 40 * 365):
        (directory := tmp_path / str(days)).mkdir()
        Authority.make(days, now).write(directory)
        texts.append((directory / "ca.pem").read_text())
        assert expires_at(texts[-1]) == (now + dt.timedelta(days=days)).timestamp()
    assert expires_at("\n".join(texts)) == expires_at(texts[1])
    for text in ("nothing", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        with pytest.raises(ValueError, match="certificate"):
            expires_at(text)


def test_the_metric_follows_the_file_and_is_absent_without_one(directory: Path, tmp_path: Path) -> None:
    registry, path = CollectorRegistry(), tmp_path / "worker.pem"
    registry.register(CertificateExpiry([path]))

    def seconds_left() -> float | None:
        return registry.get_sample_value("quire_certificate_seconds_left", {"file": str(path)})

    assert seconds_left() is None
    path.write_bytes((directory / "worker.pem").read_bytes())
    assert seconds_left() == pytest.approx(expires_at(path.read_text()) - dt.datetime.now(dt.UTC).timestamp(), abs=60)
    before = seconds_left()
    # Bundles of authorities have names between the certificates, in any encoding.
    path.write_bytes(b"# F\xf5tan\xfas\xedtv\xe1ny \xc5\x91\n" + (directory / "worker.pem").read_bytes())
    assert seconds_left() == pytest.approx(before, abs=60)
