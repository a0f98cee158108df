"""TLS between Flower's parts in which both sides show a certificate of one authority.

Flower's servers show a certificate, and its clients check that. Here its servers ask for one as well: who has
none of the same authority is refused in the handshake, before Flower reads a byte of what it sends. A process
takes part in that by a variable, with which each of our commands of Flower's names begins.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from flower_gpu.errors import ConfigError

#: The file with what a process shows others.
VARIABLE: Final = "FLOWER_GPU_TLS"

_VERSION: Final = ssl.TLSVersion.TLSv1_3


@dataclass(frozen=True)
class Identity:
    """A private key with its certificate, in one file, and beside it the certificate of their authority."""

    path: Path

    @property
    def authority(self) -> Path:
        """File with the certificate that all others' must be signed by."""
        return self.path.with_name("ca.crt")

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of a process has that shows this identity."""
        return {VARIABLE: str(self.path)}

    @property
    def server_options(self) -> tuple[str, ...]:
        """What Flower's servers are given."""
        own, authority = str(self.path), str(self.authority)
        return ("--ssl-certfile", own, "--ssl-keyfile", own, "--ssl-ca-certfile", authority)

    @property
    def client_options(self) -> tuple[str, ...]:
        """What Flower's clients are given."""
        return ("--root-certificates", str(self.authority))

    def client_context(self) -> ssl.SSLContext:
        """Return what connects to servers of the same authority only, and shows them this identity."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = _VERSION
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.path)
        return context


def use(environ: Mapping[str, str], *, with_server: bool = False) -> None:
    """Have Flower's clients in this process show the identity of its environment, if there is one.

    From then on no client of Flower's connects without TLS. In a process that runs code of an app, servers
    are the app's own.

    Parameters
    ----------
    environ : mapping
        The environment.
    with_server : bool
        Whether this process is a server of Flower's: it starts none without TLS then, and its server asks
        for certificates.

    Raises
    ------
    ConfigError
        If this version of Flower does not let itself be told.
    """
    if not environ.get(VARIABLE):
        return
    from flwr.supercore.protobuf.client import ProtobufClient

    identity = Identity(Path(environ[VARIABLE]))
    if with_server:
        import uvicorn

        _replace(uvicorn.Config, "load", functools.partial(_asking, identity))
    _replace(ProtobufClient, "__init__", functools.partial(_showing, identity))


def _replace(owner: type, name: str, around: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    own = vars(owner).get(name)
    if own is None:
        raise ConfigError(
            f"flwr {version('flwr')} connects its parts in another way than the versions that flower-gpu "
            "knows: install flwr 1.41, or leave --secure out"
        )
    setattr(owner, name, around(own))


def _asking(identity: Identity, load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def asking(config: Any) -> None:
        config.ssl_ca_certs = str(identity.authority)
        config.ssl_cert_reqs = ssl.CERT_REQUIRED
        load(config)
        if not isinstance(config.ssl, ssl.SSLContext) or config.ssl.verify_mode != ssl.CERT_REQUIRED:
            raise ConfigError(f"a server of Flower's without certificates: process {os.getpid()} starts none")
        config.ssl.minimum_version = _VERSION

    return asking


def _showing(identity: Identity, make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def showing(client: Any, base_url: str, **options: Any) -> None:
        if not base_url.startswith("https://"):
            raise ConfigError(f"{base_url}: process {os.getpid()} connects by TLS only")
        make(client, base_url, **{**options, "verify": identity.client_context()})

    return showing
