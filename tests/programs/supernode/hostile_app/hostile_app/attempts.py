"""Attempts of an app to reach more than its message. The result of each is "done" or the error."""

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import pathlib
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from multiprocessing import process

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSCALLS = {
    "x86_64": {"io_uring_setup": 425, "add_key": 248, "bpf": 321, "perf_event_open": 298, "mq_open": 240},
    "aarch64": {"io_uring_setup": 425, "add_key": 217, "bpf": 280, "perf_event_open": 241, "mq_open": 180},
}[os.uname().machine]
_FAST_OPEN = 0x20000000
# linux/fs.h
_GET_FLAGS, _SET_FLAGS, _NO_DUMP = 0x80086601, 0x40086602, 0x40
_NAMESPACES = {"user": 0x10000000, "mount": 0x00020000}


def _syscall(number, *args):
    """Call a function of the kernel by its number, and raise OSError if it fails."""
    result = _LIBC.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _libc(name, *args):
    result = getattr(_LIBC, name)(*args)
    if result in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _read(path):
    with open(path, "rb") as file:
        file.read(1)


def _write(path):
    with open(path, "ab") as file:
        file.write(b"x")


def _link(path, kind):
    new = os.path.join(os.environ["TMPDIR"], f"taken-{kind}-{os.getpid()}")
    getattr(os, kind)(path, new)
    _read(new)


def _mode(path):
    mode_before = os.stat(path).st_mode
    os.chmod(path, mode_before ^ stat.S_IXOTH)
    changed = os.stat(path).st_mode != mode_before
    os.chmod(path, mode_before)
    if not changed:
        raise OSError(errno.EPERM, "nothing changed")


def _date(path, times):
    time_before = os.stat(path).st_mtime_ns
    os.utime(path, times)
    if os.stat(path).st_mtime_ns == time_before:
        raise OSError(errno.EPERM, "nothing changed")


def _flags(path):
    """Change a flag of a file with a descriptor that is open only for reading."""
    with open(path, "rb") as file:
        flags = struct.unpack("q", fcntl.ioctl(file, _GET_FLAGS, bytes(8)))[0]
        fcntl.ioctl(file, _SET_FLAGS, struct.pack("q", flags ^ _NO_DUMP))


def _setuid():
    """Leave a program that runs as this account, no matter which account starts it."""
    path = os.path.join(os.environ["TMPDIR"], f"setuid-{os.getpid()}")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o4755))
    if not os.stat(path).st_mode & stat.S_ISUID:
        raise OSError(errno.EPERM, "no setuid bit")


def _setuid_counts():
    """Check if a setuid program of the system would run as its owner."""
    no_new_privileges = 39  # prctl's PR_GET_NO_NEW_PRIVS
    if _LIBC.prctl(no_new_privileges, 0, 0, 0, 0):
        raise OSError(errno.EPERM, "no new privileges")


def _priority(pid):
    priority_before = os.getpriority(os.PRIO_PROCESS, pid)
    os.setpriority(os.PRIO_PROCESS, pid, priority_before + 1)
    if os.getpriority(os.PRIO_PROCESS, pid) == priority_before:
        raise OSError(errno.EPERM, "nothing changed")


def _killed_first(pid):
    """Make the kernel kill this process first when memory runs out."""
    with open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write("1000")


def _scheduler(pid):
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    if os.sched_getscheduler(pid) != os.SCHED_IDLE:
        raise OSError(errno.EPERM, "nothing changed")


def _join_group(group):
    """Move a process into the group of a worker. It would then survive the end of this group."""
    code = "import os, sys; os.setpgid(0, int(sys.argv[1]))"
    completed = subprocess.run([sys.executable, "-c", code, str(group)], capture_output=True, text=True)
    if completed.returncode:
        raise PermissionError(completed.stderr.strip().rpartition("\n")[2])


def _connect(address, family=socket.AF_INET, protocol=0):
    with socket.socket(family, socket.SOCK_STREAM, protocol) as sock:
        sock.settimeout(5)
        sock.connect(address)


def _fast_open(address, way):
    with socket.socket() as sock:
        if way == "sendto":
            sock.sendto(b"x", _FAST_OPEN, address)
        else:
            sock.sendmsg([b"x"], [], _FAST_OPEN, address)


def _udp(address):
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", address)


def _bind():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()


def _listen():
    with socket.socket() as sock:
        sock.listen()


def _socket(*arguments):
    socket.socket(*arguments).close()


def _memory_of(pid):
    with open(f"/proc/{pid}/maps") as file:
        address = int(file.readline().partition("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        file.seek(address)
        file.read(16)


def _trace(pid):
    attach, detach = 16, 17
    _libc("ptrace", attach, pid, None, None)
    os.waitpid(pid, 0)
    _libc("ptrace", detach, pid, None, None)


def _limit(pid):
    resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE))


def _mount(namespaces):
    """Mount a file system in a child with its own mount namespace."""
    code = (
        "import ctypes, sys; libc = ctypes.CDLL(None); "
        f"sys.exit(0 if libc.unshare({sum(_NAMESPACES[name] for name in namespaces)}) == 0 and "
        "libc.mount(b'x', sys.argv[1].encode(), b'tmpfs', 0, None) == 0 else 1)"
    )
    folder = os.path.join(os.environ["TMPDIR"], f"mount-{os.getpid()}")
    os.makedirs(folder, exist_ok=True)
    if subprocess.run([sys.executable, "-c", code, folder]).returncode:
        raise OSError(errno.EPERM, "not mounted")


def _device():
    path = os.path.join(os.environ["TMPDIR"], f"device-{os.getpid()}")
    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(259, 0))
    os.unlink(path)


def _by_handle(folder, path):
    handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    _libc("name_to_handle_at", -100, path.encode(), handle, ctypes.byref(mount), 0)
    at = os.open(folder, os.O_RDONLY)
    os.close(_libc("open_by_handle_at", at, handle, os.O_RDONLY))


def _worker_of_fork_server(secret):
    """Read the file in a worker of the account's fork server."""
    from flower_gpu import run_in_worker

    data = run_in_worker(read_for_another, secret, start_method="forkserver")
    if not data:
        raise OSError(errno.EPERM, "nothing came")


def read_for_another(path):
    return pathlib.Path(path).read_bytes()


def _in_thread(function):
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _in_program(code, *args):
    """Run Python code in a new process with an empty environment."""
    completed = subprocess.run(
        [sys.executable, "-I", "-c", code, *args], env={}, capture_output=True, text=True
    )
    if completed.returncode:
        raise PermissionError(completed.stderr.strip().rpartition("\n")[2])


def attempts(targets):
    """Make all attempts and return their results by name."""
    secret, port, pid = targets["secret"], ("127.0.0.1", targets["port"]), targets["pid"]
    outside = os.path.dirname(secret)
    tried = {
        "read a file of the account": lambda: _read(secret),
        "read it in a thread": lambda: _in_thread(lambda: _read(secret)),
        "read it in another program": lambda: _in_program("import sys; open(sys.argv[1]).read()", secret),
        "read it by a link": lambda: _link(secret, "symlink"),
        "read it by a hard link": lambda: _link(secret, "link"),
        "read it by a handle": lambda: _by_handle(outside, secret),
        "read it by another worker": lambda: _worker_of_fork_server(secret),
        "list a folder of the account": lambda: os.listdir(outside),
        "read an SSH key": lambda: _read(targets["ssh"]),
        "read the SuperNode's key": lambda: _read(targets["key"]),
        "read another client's data": lambda: _read(targets["data"]),
        "read the passwords of the system": lambda: _read("/etc/shadow"),
        "list the ledger": lambda: os.listdir(targets["ledger"]),
        "lock the ledger": lambda: os.close(os.open(targets["mutex"], os.O_RDWR)),
        "list the state folder": lambda: os.listdir(targets["state"]),
        "write a file of the account": lambda: _write(secret),
        "make a file there": lambda: _write(os.path.join(outside, f"new-{os.getpid()}")),
        "make a folder there": lambda: os.mkdir(os.path.join(outside, f"folder-{os.getpid()}")),
        "empty a file there": lambda: os.truncate(targets["victims"][0], 0),
        "remove a file there": lambda: os.unlink(targets["victims"][1]),
        "rename a file there": lambda: os.rename(targets["victims"][2], targets["victims"][2] + "-new"),
        "change the mode of a file there": lambda: _mode(secret),
        "set an attribute of a file there": lambda: os.setxattr(secret, "user.x", b"1"),
        "list the attributes of a file there": lambda: os.listxattr(secret),
        "set the date of a file there": lambda: _date(secret, (1, 1)),
        "set the date of a file there to now": lambda: _date(targets["victims"][0], None),
        "read the data": lambda: _read(targets["named"]),
        "write to the data": lambda: _write(targets["named"]),
        "set the date of the data": lambda: _date(targets["named"], (1, 1)),
        "change a flag of the data": lambda: _flags(targets["named"]),
        "leave a setuid program": _setuid,
        "run a setuid program as its owner": _setuid_counts,
        "write to the Python environment": lambda: os.close(os.open(targets["package"], os.O_WRONLY)),
        "make a device": _device,
        "mount": lambda: _mount(["mount"]),
        "mount in a user namespace": lambda: _mount(["user", "mount"]),
        "connect by TCP": lambda: _connect(port),
        "connect by TCP in a thread": lambda: _in_thread(lambda: _connect(port)),
        "connect by TCP in another program": lambda: _in_program(
            "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)", str(port[1])
        ),
        "connect by TCP over IPv6": lambda: _connect((f"::ffff:{port[0]}", port[1]), socket.AF_INET6),
        "connect by multipath TCP": lambda: _connect(port, socket.AF_INET, 262),
        "connect by sending (sendto)": lambda: _fast_open(port, "sendto"),
        "connect by sending (sendmsg)": lambda: _fast_open(port, "sendmsg"),
        "listen at a TCP port": _bind,
        "listen at a port that the kernel chooses": _listen,
        "send by UDP": lambda: _udp(port),
        "open a raw socket": lambda: _socket(socket.AF_INET, socket.SOCK_RAW, 1),
        "open a packet socket": lambda: _socket(socket.AF_PACKET, socket.SOCK_RAW, 0),
        "open a socket of virtual machines": lambda: _socket(socket.AF_VSOCK, socket.SOCK_STREAM),
        "open a crypto socket": lambda: _socket(socket.AF_ALG, socket.SOCK_SEQPACKET, 0),
        "open netlink of the firewall": lambda: _socket(socket.AF_NETLINK, socket.SOCK_RAW, 12),
        "connect to an abstract socket": lambda: _connect("\0" + targets["abstract"], socket.AF_UNIX),
        "connect to a socket with a path": lambda: _connect(targets["socket"], socket.AF_UNIX),
        "signal a process": lambda: os.kill(pid, signal.SIGCONT),
        "signal the caller": lambda: os.kill(os.getppid(), 0),
        "signal it in another program": lambda: _in_program(
            "import os, sys; os.kill(int(sys.argv[1]), 0)", str(pid)
        ),
        "signal by a pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGCONT),
        "read a process's environment": lambda: _read(f"/proc/{pid}/environ"),
        "read a process's memory": lambda: _memory_of(pid),
        "list a process's files": lambda: [os.readlink(path) for path in _required(f"/proc/{pid}/fd/*")],
        "trace a process": lambda: _trace(pid),
        "set a limit of a process": lambda: _limit(pid),
        "have a process killed first": lambda: _killed_first(pid),
        "lower the priority of a process": lambda: _priority(pid),
        "let a process run on idle cores only": lambda: _scheduler(pid),
        "join the group of a process": lambda: _join_group(os.getpgid(os.getppid())),
        "use io_uring": lambda: os.close(_syscall(_SYSCALLS["io_uring_setup"], 4, bytes(120))),
        "keep a key": lambda: _syscall(_SYSCALLS["add_key"], b"user", b"x", b"y", 1, -3),
        "load a program into the kernel": lambda: _syscall(_SYSCALLS["bpf"], 0, bytes(128), 128),
        "share memory of System V": lambda: _libc("shmget", 0, 4096, 0o600 | 0o1000),
        "open a message queue": lambda: os.close(
            _syscall(_SYSCALLS["mq_open"], f"q{os.getpid()}".encode(), os.O_RDWR | os.O_CREAT, 0o600, None)
        ),
        "read a file in /dev/shm": lambda: _read(targets["shared"]),
        "change a file in /dev/shm": lambda: _write(targets["shared"]),
        "see the name and size of a file": lambda: os.stat(secret),
        "see a command line": lambda: _read(f"/proc/{pid}/cmdline"),
        "read a disk": lambda: _read(targets["disk"] or "/dev/disk-that-is-not-there"),
    }
    environment = dict(os.environ)
    results = {}
    for name, attempt in tried.items():
        try:
            attempt()
            results[name] = "done"
        except BaseException as error:
            results[name] = f"{type(error).__name__}: {error}"[:200]
    os.environ.clear()
    try:
        _read(secret)
        results["read it with an empty environment"] = "done"
    except OSError as error:
        results["read it with an empty environment"] = str(error)
    os.environ.update(environment)
    worker_folder = os.environ["TMPDIR"]
    if targets["leaves"]:
        results["left"] = json.dumps(_leave(worker_folder, targets["state"]))
    results["own"] = json.dumps(worker_folder)
    return results


def _required(pattern):
    if not (paths := glob.glob(pattern)):
        raise PermissionError(pattern)
    return paths


def _leave(folder, state):
    """Leave folders that are hard to remove, and running processes. Returns the kinds of processes."""
    # The second folder is the one in which multiprocessing creates sockets.
    for path in (folder, process.current_process()._config["tempdir"]):
        deep = os.open(path, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=deep)
            inner = os.open("d", os.O_RDONLY, dir_fd=deep)
            os.close(deep)
            deep = inner
        os.close(deep)
        os.mkdir(os.path.join(path, "closed"), 0)
        os.symlink(os.path.dirname(path), os.path.join(path, "up"))
    line = [sys.executable, "-c", "import time; time.sleep(600)", f"left by {folder}"]
    subprocess.Popen(line, start_new_session=True)
    kinds = ["a process in a session of its own"]
    for log in _logs_of_fork_servers(state):
        subprocess.Popen(line, start_new_session=True, stderr=log)
        kinds.append("a process whose errors seem to go to the log of a fork server")
    return kinds


def _logs_of_fork_servers(state):
    """Open the logs of fork servers with O_PATH, which needs no permission. Their names are in /proc."""
    names = re.findall(r"/\.([0-9a-f]{20})\.\d+$", pathlib.Path("/proc/net/unix").read_text(), re.MULTILINE)
    for name in dict.fromkeys(names):
        with contextlib.suppress(OSError):  # a fork server of another account
            yield os.open(f"{state}/{name}.log", os.O_PATH)
