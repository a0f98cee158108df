"""A SuperLink that authenticates SuperNodes by their keys, and `flwr` commands that talk to it."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from how_to_pages import block
from run_programs import run
from waiting import until

from flower_gpu.launch import ports
from flower_gpu.workers.forkserver.identity import script_folders

#: A `flower-gpu` whose SuperNodes retry after 1 s if the SuperLink does not know their keys.
#: A second early exit for any other reason ends the command.
QUICK_RETRIES = """
import sys
from flower_gpu.cli import main, supernode
supernode._TURNED_AWAY_PAUSE_S = 1.0
supernode._EARLY_ENDS = 2
sys.exit(main.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink with TLS that admits only registered nodes."""

    port: int
    authority: Path
    env: Mapping[str, str]

    def flwr(self, line: str, folder: Path | None = None) -> str:
        """Run a Flower command line as it was printed or as a page has it, and return its stdout."""
        done = run(shlex.split(line), env=self.env, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def nodes(self) -> list[dict[str, object]]:
        text = self.flwr("flwr supernode list here --format json")
        return json.loads(text[text.index("{") :])["nodes"]  # type: ignore[no-any-return]

    def start_node(self, folder: Path, output_path: Path) -> subprocess.Popen[bytes]:
        """Start a SuperNode as docs/how-to/supernodes.md says, with the key that the page makes."""
        run(["bash", "-ec", block("supernodes.md", "bash", "ssh-keygen")], cwd=folder).check_returncode()
        line = block("supernodes.md", "bash", "--auth-supernode-private-key")
        line = re.sub(r"(?<=--superlink )\S+", f"{ports.HOST}:{self.port}", line)
        line = re.sub(r"(?<=--root-certificates )\S+", str(self.authority), line)
        words = shlex.split(line.replace("\\\n", " "))
        with output_path.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", QUICK_RETRIES, *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=self.env,
            )


def write_certificate(certificate: Path, key: Path) -> None:
    """Write a self-signed certificate for the loopback address, and its private key."""
    private_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "superlink of a test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, private_key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(ports.HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private_key, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(Encoding.PEM))
    key.write_bytes(private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@contextmanager
def keyed_superlink(folder: Path) -> Iterator[SuperLink]:
    """Run a SuperLink until the block ends, with all its files in a folder."""
    for name in ("state", "flwr"):
        (folder / name).mkdir(mode=0o700)
    ca, private_key = folder / "ca.crt", folder / "superlink.pem"
    write_certificate(ca, private_key)
    port = ports.free_ports(1)[0]
    config = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{ports.HOST}:{port}"\n'
    (folder / "flwr" / "config.toml").write_text(f'{config}root-certificates = "{ca}"\n')
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLOWER_GPU_")},
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLOWER_GPU_STATE_DIR": str(folder / "state"),
        "FLOWER_GPU_LEDGER_DIR": str(folder / "state"),
        "FLOWER_GPU_SERVER_IDLE_S": "10",
        "PATH": os.pathsep.join([*script_folders(), os.environ["PATH"]]),
    }
    with (folder / "superlink.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("flower-superlink", "--enable-supernode-auth", "--host", ports.HOST, "--port", str(port)),
                *("--ssl-ca-certfile", str(ca), "--ssl-certfile", str(ca), "--ssl-keyfile", str(private_key)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
        )
    try:
        until(lambda: ports.listens(process.pid, port), "the SuperLink answers", 60)
        yield SuperLink(port, ca, env)
    finally:
        process.terminate()
        process.wait(timeout=60)
