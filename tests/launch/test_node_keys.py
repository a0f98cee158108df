"""Keys of SuperNodes: made, kept, refused; and what Flower itself reads of them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication
from run_programs import run, run_python

from flower_gpu.errors import ConfigError
from flower_gpu.launch.node_keys import NodeKey, node_keys


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_private(path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    path.chmod(0o600)


def flower_reads(key: NodeKey) -> bytes:
    """Read both files with Flower's own functions; return the public key, in its form on the network."""
    pair = _try_setup_client_authentication(
        SimpleNamespace(auth_supernode_private_key=str(key.private), auth_supernode_public_key=None)  # type: ignore[arg-type]
    )
    assert pair is not None
    assert isinstance(pair[0].curve, ec.SECP384R1)
    registered = try_load_public_key(key.public)
    assert registered == public_key_to_bytes(pair[1])
    return registered


def test_keys_are_made_for_their_owner_alone_in_the_form_that_flower_reads(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    mask = os.umask(0)
    try:
        keys = node_keys(folder, 3)
    finally:
        os.umask(mask)
    assert sorted(contents(folder)) == [f"supernode-{n}{end}" for n in range(3) for end in ("", ".pub")]
    assert mode_of(folder) == 0o700
    assert [mode_of(key.private) for key in keys] == [0o600] * 3
    assert len({flower_reads(key) for key in keys}) == 3
    for key in keys:
        assert key.public_text.startswith("ecdsa-sha2-nistp384 ")
        assert key.public.read_text() == f"{key.public_text}\n"
        assert key.register_command == f"flwr supernode register {key.public}"


def test_keys_are_kept_and_more_nodes_get_more(tmp_path: Path) -> None:
    node_keys(tmp_path / "keys", 2)
    before = contents(tmp_path / "keys")
    node_keys(tmp_path / "keys", 4)
    after = contents(tmp_path / "keys")
    assert len(after) == 8
    assert {name: after[name] for name in before} == before


def test_a_public_key_is_that_of_its_private_key(tmp_path: Path) -> None:
    first, second = node_keys(tmp_path / "keys", 2)
    first.public.write_text(second.public.read_text())
    second.public.unlink()
    assert [key.public_text for key in node_keys(tmp_path / "keys", 2)] == [
        first.public_text,
        second.public_text,
    ]
    assert len({flower_reads(first), flower_reads(second)}) == 2


def test_a_users_own_key_of_another_nist_curve_is_kept_with_its_comment(tmp_path: Path) -> None:
    private = tmp_path / "keys" / "supernode-0"
    write_private(private, ec.generate_private_key(ec.SECP256R1()))
    [key] = node_keys(tmp_path / "keys", 1)
    key.public.write_text(f"{key.public_text} lab 3\n")
    before = contents(tmp_path / "keys")
    [again] = node_keys(tmp_path / "keys", 1)
    assert contents(tmp_path / "keys") == before
    assert try_load_public_key(again.public)


def test_commands_that_make_the_same_keys_at_once_get_the_same(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from flower_gpu.launch.node_keys import node_keys; "
        "from cryptography.hazmat.primitives.asymmetric import ec; print(flush=True); sys.stdin.readline(); "
        "print([key.public_text for key in node_keys(Path(sys.argv[1]), 8)])"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "keys")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()  # it has imported all
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert len({process.communicate(timeout=60)[0] for process in started}) == 1
    assert [process.returncode for process in started] == [0] * 4
    assert len(contents(tmp_path / "keys")) == 16


def shared_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def below_a_file(folder: Path) -> None:
    folder.symlink_to(folder.parent / "file" / "keys")
    (folder.parent / "file").write_text("")


def open_key(folder: Path) -> None:
    node_keys(folder, 1)
    (folder / "supernode-0").chmod(0o640)


def pem_key(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "supernode-0").touch(0o600)
    (folder / "supernode-0").write_bytes(
        ec.generate_private_key(ec.SECP384R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def ed25519_key(folder: Path) -> None:
    write_private(folder / "supernode-0", ed25519.Ed25519PrivateKey.generate())


def key_with_password(folder: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    folder.mkdir(mode=0o700)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "a word", "-f", str(folder / "supernode-0")],
        check=True,
        timeout=150,
    )


def folder_for_a_key(folder: Path) -> None:
    (folder / "supernode-0").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)


def anothers_key(folder: Path) -> None:
    node_keys(folder, 1)
    os.chown(folder / "supernode-0", 1234, 1234)


def anothers_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 1234, 1234)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (shared_folder, "must be a folder of this account chmod go-w"),
        (below_a_file, "Not a directory. Give a folder that this account can write to"),
        (open_key, "supernode-0 must be a file of this account (mode 0640): chmod 600 Or move it away"),
        (pem_key, "supernode-0 is not an EC key in OpenSSH's format make one with Or move it away"),
        (ed25519_key, "supernode-0 is not an EC key ssh-keygen -t ecdsa -b 384"),
        (
            key_with_password,
            "supernode-0 is not an EC key without a password ssh-keygen -t ecdsa -b 384 -N ''",
        ),
        (folder_for_a_key, "supernode-0 must be a file of this account Or move it away"),
        pytest.param(anothers_key, "supernode-0 must be a file of this account", marks=as_root),
        pytest.param(anothers_folder, "must be a folder of this account", marks=as_root),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_do(
    make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    make(folder)
    with pytest.raises(ConfigError) as refused:
        node_keys(folder, 1)
    assert [word for word in words.split() if word not in str(refused.value)] == [], refused.value


def test_a_folder_that_cannot_be_written_to_is_refused_with_what_to_do(tmp_path: Path) -> None:
    # Root may write everywhere, but not into the kernel's own tree.
    with pytest.raises(
        ConfigError, match=r"--keys /proc/self/keys: .*Give a folder that this account can write to"
    ):
        node_keys(Path("/proc/self/keys"), 1)


def test_a_key_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """A full disk, or a kill in the middle, leaves no half key that every later start would refuse."""
    program = (
        "import resource, signal, sys; from pathlib import Path; "
        "from flower_gpu.launch.node_keys import node_keys; "
        "import cryptography.hazmat.primitives.asymmetric.ec, cryptography.hazmat.primitives.serialization; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
        "node_keys(Path(sys.argv[1]), 1)"
    )
    done = run_python(program, str(tmp_path / "keys"))
    assert re.search(r"ConfigError: --keys .*: .*File too large", done.stderr), done.stderr
    assert contents(tmp_path / "keys") == {}
    [key] = node_keys(tmp_path / "keys", 1)
    flower_reads(key)


def test_ssh_keygen_takes_the_key_for_one_of_its_own(tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    [key] = node_keys(tmp_path / "keys", 1)
    done = run(["ssh-keygen", "-y", "-f", str(key.private)])
    assert done.stdout.split() == key.public_text.split(), done.stderr
