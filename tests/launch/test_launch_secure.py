"""`flower-gpu launch --secure`: who gets in and who does not, asked of a live run; and what it leaves."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import run_programs
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from launch_helpers import COMMAND, processes_of
from run_programs import run_python
from waiting import until

from flower_gpu import trace
from flower_gpu.flower.mutual_tls import Identity
from flower_gpu.launch import ports
from flower_gpu.launch.authority import Authority
from flower_gpu.launch.node_keys import NodeKey, node_keys
from flower_gpu.launch.run_keys import made_for_run
from flower_gpu.launch.superlink import supernode_command
from flower_gpu.workers.forkserver.identity import script_folders

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

T = TypeVar("T")
TIMEOUT_S = 240
CLIENTS = 2
SUPERNODE = [sys.executable, "-P", "-c", "from flower_gpu.flower.supernode import main; main()"]
OPERATOR = [sys.executable, "-P", "-c", "from flower_gpu.flower.operator import main; main()"]
FLWR = Path(sys.executable).with_name("flwr")


@dataclass
class SecureRun:
    """A launch with --secure, with a state folder of its own."""

    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, folder: Path, *arguments: str) -> SecureRun:
        app = shutil.copytree(Path(__file__).parent / "tiny_app", folder / "tiny_app")
        process = subprocess.Popen(
            [*COMMAND, str(app), "--secure", f"--clients={CLIENTS}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=own_environment(folder),
        )
        return cls(folder, process)

    @property
    def run_folder(self) -> Path:
        (found,) = (self.folder / "runs").iterdir()
        return found

    @property
    def keys(self) -> Path:
        (found,) = self.key_folders()
        return found

    def key_folders(self) -> list[Path]:
        return list(self.folder.glob("state/*/run-keys/*"))

    def wait_for_training(self) -> None:
        def trains() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            traces = self.folder.glob(f"runs/*/{trace.FILE_NAME}")
            return any("worker_started" in file.read_text() for file in traces)

        until(trains, "a client trains", TIMEOUT_S)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def of_processes(self, what: Callable[[psutil.Process], T]) -> list[T]:
        """Ask each process of the run for something; one that ends meanwhile is left out."""
        found = []
        for pid in processes_of(self.folder / "runs"):
            with suppress(psutil.Error):
                found.append(what(psutil.Process(pid)))
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        until(lambda: not processes_of(self.folder / "runs"), "every process of the run is gone")


def own_environment(folder: Path) -> dict[str, str]:
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLOWER_GPU")},
        "FLOWER_GPU_STATE_DIR": str(folder / "state"),
        "FLOWER_GPU_LEDGER_DIR": str(folder / "state"),
        "FLOWER_GPU_SERVER_IDLE_S": "10",
        "PATH": os.pathsep.join([*script_folders(), os.environ["PATH"]]),
    }


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRun]:
    """A run whose clients train as long as the tests of this module ask."""
    run = SecureRun.start(tmp_path_factory.mktemp("live"), "--run-config", "seconds=1000.0")
    try:
        run.wait_for_training()
        yield run
    finally:
        run.end()


@pytest.fixture
def other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Identity]:
    """What an operator of another run has: as good as this run's, but of another authority."""
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path))
    with made_for_run(1) as keys:
        yield keys.operator


def listening(run: SecureRun) -> set[tuple[str, int]]:
    return {
        (each.laddr.ip, each.laddr.port)
        for connections in run.of_processes(lambda process: process.net_connections("inet"))
        for each in connections
        if each.status == psutil.CONN_LISTEN
    }


def ask(port: int, context: ssl.SSLContext | None) -> str:
    """Ask a server for its health; return its status, or why there is no answer."""
    connection: http.client.HTTPConnection = (
        http.client.HTTPConnection(ports.HOST, port, timeout=20)
        if context is None
        else http.client.HTTPSConnection(ports.HOST, port, timeout=20, context=context)
    )
    try:
        connection.request("GET", "/health")
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def client_of(authority: Path, shown: Path | None = None) -> ssl.SSLContext:
    """Return what an attacker connects by: any TLS version, whatever it trusts, whatever it shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    if shown is not None:
        context.load_cert_chain(shown)
    return context


def test_every_server_of_the_run_answers_its_own_parts_only(live: SecureRun, other_run: Identity) -> None:
    found = listening(live)
    assert len(found) == 1 + CLIENTS
    own = Identity(live.keys / "operator.pem")
    own_but_old = own.client_context()
    own_but_old.minimum_version = own_but_old.maximum_version = ssl.TLSVersion.TLSv1_2
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    strict = own.client_context()
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    for ip, port in sorted(found):
        assert ip == ports.HOST
        refused = {
            "without TLS": ask(port, None),
            "without a certificate": ask(port, client_of(own.authority)),
            "without a certificate, trusts everybody": ask(port, anybody),
            "with another authority's certificate": ask(port, client_of(own.authority, other_run.path)),
            "with the right one, TLS 1.2": ask(port, own_but_old),
        }
        assert not [who for who, answer in refused.items() if answer.isdecimal()], refused
        # The client's side: it does not talk to a server that another authority certifies.
        answer = ask(port, client_of(other_run.authority, own.path))
        assert "CERTIFICATE_VERIFY_FAILED" in answer
        # And that those were not refused because nobody is there.
        assert ask(port, strict) == "200"


def test_parts_of_the_run_connect_to_these_servers_only(live: SecureRun) -> None:
    servers = {port for _, port in listening(live)}
    remote: set[int] = set()

    def all_are_connected_to() -> bool:
        """Look at what is open now: a connection that nobody uses is closed after seconds."""
        for connections in live.of_processes(lambda process: process.net_connections("inet")):
            remote.update(
                each.raddr.port for each in connections if each.raddr and each.laddr.port not in servers
            )
        return len(remote) >= len(servers)

    until(all_are_connected_to, "a connection to each server was seen", 60)
    assert remote == servers


def test_nothing_of_the_run_is_insecure(live: SecureRun) -> None:
    commands = live.of_processes(lambda process: " ".join(process.cmdline()))
    assert sum("--root-certificates" in command for command in commands) >= 2 * CLIENTS
    assert not [command for command in commands if "--insecure" in command]
    texts = {path: path.read_text(errors="replace") for path in live.run_folder.rglob("*") if path.is_file()}
    assert any("https://" in text for text in texts.values())
    assert not [path for path, text in texts.items() if "http://" in text or "insecure" in text.lower()]


def start_node(run: SecureRun, key: NodeKey | None, log: Path) -> subprocess.Popen[bytes]:
    """Start one more SuperNode, with a certificate of the run, and this key."""
    config = (run.run_folder / "flwr" / "config.toml").read_text()
    port = int(re.findall(r":(\d+)", config)[0])
    identity = Identity(run.keys / "supernode-0.pem")
    secrets = (*identity.client_options, *identity.server_options, *(key.options if key else ()))
    _, *options = supernode_command(port, ports.free_ports(1)[0], {"name": "new"}, secrets)
    with log.open("wb") as file:
        return subprocess.Popen(
            [*SUPERNODE, *options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**own_environment(run.folder), **identity.variables, "FLWR_TELEMETRY_ENABLED": "0"},
        )


def test_a_node_without_a_registered_key_is_turned_away(live: SecureRun, tmp_path: Path) -> None:
    keys = node_keys(tmp_path / "keys", 2)
    for name, key in (("unknown key", keys[0]), ("no key", None)):
        log = tmp_path / f"{name}.log"
        node = start_node(live, key, log)
        try:
            assert node.wait(timeout=120) != 0, name
        finally:
            node.kill()
            node.wait()
        assert "Failed to initialize the connection to the SuperLink" in log.read_text()
        assert "SuperNode ID" not in log.read_text()

    # The same, once its key is registered.
    registered = flwr(live, OPERATOR, "register-nodes", "launch", str(keys[1].public))
    assert registered.returncode == 0, registered.stderr
    log = tmp_path / "registered.log"
    node = start_node(live, keys[1], log)
    try:
        until(lambda: "SuperNode ID" in log.read_text(), "it is let in", 120)
    finally:
        node.terminate()
        node.wait(timeout=60)


def flwr(run: SecureRun, command: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Flower's command line with the run's configuration, as its operator if ``command`` is ours."""
    shown = Identity(run.keys / "operator.pem").variables
    return run_programs.run(
        [*command, *arguments],
        env={**own_environment(run.folder), **shown, "FLWR_HOME": str(run.run_folder / "flwr")},
    )


def test_flowers_own_command_line_is_refused(live: SecureRun) -> None:
    """As the page on keys says: it has no certificate to show."""
    refused = flwr(live, [str(FLWR)], "list", "launch")
    assert refused.returncode != 0
    assert "Connection to the SuperLink is unavailable" in " ".join(refused.stderr.split())
    ours = flwr(live, OPERATOR, "list", "launch", "--format", "json")
    assert ours.returncode == 0, ours.stderr
    assert '"status": "running"' in ours.stdout


def test_keys_are_for_this_account_alone_and_that_of_the_authority_is_in_no_file(live: SecureRun) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [live.keys, *live.keys.rglob("*")]}
    assert modes.pop(live.keys) == 0o700
    private = [path for path in modes if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert len(private) == 2 + CLIENTS + CLIENTS  # SuperLink, operator, nodes; and by which nodes sign
    assert {modes[path] for path in private} == {0o600}
    authority = x509.load_pem_x509_certificate((live.keys / "ca.crt").read_bytes()).public_key()
    for path in live.keys.glob("*.pem"):
        key = load_pem_private_key(path.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        assert certificate.public_key() == key.public_key() != authority
    environments = live.of_processes(lambda process: str(process.environ()))
    assert len(environments) > 2 * CLIENTS
    assert not [text for text in environments if "PRIVATE KEY" in text]


def test_a_run_that_is_interrupted_leaves_no_key(live: SecureRun) -> None:
    """The last of the tests of this run."""
    assert len(live.key_folders()) == 1
    live.process.send_signal(signal.SIGINT)
    assert live.finish()[0] == 130
    assert live.key_folders() == []


def test_a_run_completes_and_leaves_no_key(tmp_path: Path) -> None:
    run = SecureRun.start(tmp_path, "--rounds=2")
    code, out, err = run.finish()
    assert code == 0, err
    assert "superlink, secure; logs in" in out
    assert re.search(r"│ +2 │ 0\.3333 │", out), out
    registered = (run.run_folder / "register.log").read_text()
    assert re.findall(r"^supernode-(\d) is node \d+$", registered, re.MULTILINE) == ["0", "1"]
    assert run.key_folders() == []
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    ]


def test_a_run_that_is_killed_leaves_no_key(tmp_path: Path) -> None:
    run = SecureRun.start(tmp_path, "--run-config", "seconds=1000.0")
    try:
        run.wait_for_training()
        assert len(run.key_folders()) == 1
        run.process.kill()
        assert run.finish()[0] == -9
        until(lambda: run.key_folders() == [], "the guard has removed them", 30)
    finally:
        run.end()


def test_keys_of_a_run_that_was_killed_with_its_guard_go_with_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from flower_gpu.launch.run_keys import made_for_run\n"
        "with made_for_run(1) as keys:\n    print(keys.folder, flush=True)\n    input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=own_environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().rstrip())
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "state"))
    with made_for_run(1):  # a run beside it takes nothing away
        assert left.is_dir()
    process.kill()
    process.communicate()
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    with pytest.raises(RuntimeError, match="it fails"), made_for_run(1) as keys:
        assert list(left.parent.iterdir()) == [keys.folder]
        raise RuntimeError("it fails")
    assert list(left.parent.iterdir()) == []


def test_keys_that_cannot_be_written_leave_none(tmp_path: Path) -> None:
    """A full disk: what to do is said, and no half of the keys stays."""
    program = (
        "import resource, signal; from flower_gpu.launch.run_keys import made_for_run; "
        "import cryptography.hazmat.primitives.asymmetric.ec, cryptography.hazmat.primitives.serialization; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600)); "
        "made_for_run(1).__enter__()"
    )
    done = run_python(program, env=own_environment(tmp_path))
    assert re.search(
        r"ConfigError: --secure cannot write .*File too large.*FLOWER_GPU_STATE_DIR", done.stderr
    )
    assert list(tmp_path.glob("state/*/run-keys")) != []
    assert list(tmp_path.glob("state/*/run-keys/*")) == []


def test_there_is_no_server_and_no_client_without_tls(tmp_path: Path) -> None:
    """Whatever its options say: a process that has an identity starts none."""
    (tmp_path / "ca.crt").write_bytes(Authority().certificate)
    program = """
import os
import uvicorn
from flwr.supercore.control import ControlHttpClient
from flower_gpu.errors import ConfigError
from flower_gpu.flower import mutual_tls

mutual_tls.use(os.environ, with_server=True)
for what in (
    lambda: uvicorn.Config(app=None).load(),
    lambda: ControlHttpClient.from_server_address("127.0.0.1:9", True, None, []),
):
    try:
        what()
    except ConfigError as error:
        print(error)
"""
    done = run_python(program, env={**os.environ, **Identity(tmp_path / "own.pem").variables})
    assert re.fullmatch(
        r"a server of Flower's without certificates: .*\nhttp://127.0.0.1:9: .* connects by TLS only\n",
        done.stdout,
    ), done
