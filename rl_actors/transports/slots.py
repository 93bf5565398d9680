"""Slots and the locks on them. A slot is shared memory in which one rank of the trainer keeps its part of one version of the weights.

A slot is a memfd, a file in memory that has no path. So the kernel frees the slot when no process has the slot open any more, even if the
processes were killed with kill -9. The size of /dev/shm does not limit a slot. The writer is the process of the rank. A reader is a process
that loads the weights. A reader opens the slot as /proc/<pid>/fd/<number>. The writer holds an exclusive flock on the slot while it writes,
and readers hold a shared flock while they read. So a slot is never rewritten while a process reads it. When a process dies, the kernel
releases its locks.

The first page of a slot has the key of the version that the slot holds, for example "<stream>/7" for version 7. The layout of the slot
follows as JSON, and then the tensors. If the tensors are on a GPU, they are not in the memfd. The memfd then ends with the layout.
"""

import contextlib
import fcntl
import json
import logging
import mmap
import os
import secrets
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rl_actors.transports import cuda_ipc
from rl_actors.transports.placement import Place

logger = logging.getLogger(__name__)

PAGE = 4096
ALIGNMENT = 64  # every tensor in a slot begins at a multiple of this number of bytes
HEAD = struct.Struct("<8s16sQQQ")
"""The first bytes of a slot: magic, token, number of bytes of the layout, offset of the tensors, number of bytes of the tensors."""
MAGIC = b"rlweight"
KEY_OFFSET = 64  # offset of one byte with the length of the key; the key follows
LOCK_POLL_SECONDS = 0.002
KEPT_MAPPINGS = 3
"""A reader unmaps a slot when it has read this many versions in a row from other slots. If a rank has two slots, it writes its versions to
them in turn. So a slot must stay mapped although the next version is not in it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor, and its place in a slot."""

    shape: tuple[int, ...]  # shape of the whole tensor
    start: tuple[int, ...]  # indices of the part's first value in the whole tensor
    size: tuple[int, ...]  # shape of the part
    dtype: torch.dtype
    offset: int  # number of bytes from the start of the slot's tensors to this part

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a slot. `shards` maps the name of a tensor to the part that one rank holds, in the order in which the parts lie in the slot."""

    shards: Mapping[str, Shard]
    num_bytes: int  # size of all parts in a slot, with the padding between them

    def to_json(self) -> bytes:
        rows = []
        for name, shard in self.shards.items():
            dtype = str(shard.dtype).removeprefix("torch.")
            rows.append([name, shard.shape, shard.start, shard.size, dtype, shard.offset])
        return json.dumps({"num_bytes": self.num_bytes, "shards": rows}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Layout":
        values = json.loads(text)
        shards = {}
        for name, shape, start, size, dtype, offset in values["shards"]:
            shards[name] = Shard(tuple(shape), tuple(start), tuple(size), getattr(torch, dtype), offset)
        return cls(shards, values["num_bytes"])

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """Each part as a view of `data`, the bytes of a slot's tensors."""
        views = {}
        for name, shard in self.shards.items():
            part = data[shard.offset : shard.offset + shard.num_bytes]
            views[name] = part.view(shard.dtype).view(shard.size)
        return views


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAddress:
    """Data with which another process finds a slot. The manifest of a version has the addresses of the slots that hold the version."""

    rank: int  # the trainer's rank that writes the slot
    slot: int  # number of the slot among this rank's slots
    machine: str  # machine() of the rank
    pid: int
    fd: int
    token: bytes = b""  # random bytes that identify the slot, because a later process may have the same pid and fd
    num_bytes: int  # number of bytes of the tensors
    address: tuple[str, int] | None = None  # host and port of the rank's server (server.py), if the rank has one
    weights_on_gpu: bool = False  # True if the rank trains on a GPU; even then the slot may be in the host's memory
    # If the slot is on a GPU: the GPU's id, and the CUDA IPC handle of the slot's memory. The memfd then has only the lock, the key and the layout.
    gpu: str = ""
    handle: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return f"slot {self.slot} of trainer rank {self.rank} (pid {self.pid})"


class VersionGoneError(RuntimeError):
    """A version can no longer be read: its slot no longer holds the version, or the trainer has dropped the slot or has ended."""


def machine() -> str:
    """The kernel's boot id and the id of this process's pid namespace. Two processes for which both ids are the same see each other in /proc."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def actor_name() -> str:
    """The name of this process in error texts: "trainer-1 (pid 17)", or "pid 17" if this package did not spawn the process."""
    name = os.environ.get("RL_ACTORS_PROCESS")
    return f"{name} (pid {os.getpid()})" if name else f"pid {os.getpid()}"


class Slot:
    """The writer's side of a slot. The constructor allocates all memory of the slot."""

    def __init__(self, layout: Layout, *, rank: int, number: int, place: Place, device: torch.device) -> None:
        """device: the device of the weights. If place.on_gpu is True, the tensors of the slot are on this device, too."""
        self.layout, self.rank, self.number, self.device = layout, rank, number, device
        text = layout.to_json()
        self.data_offset = _round_up(PAGE + len(text), PAGE)
        self.token = secrets.token_bytes(16)
        self.fd = os.memfd_create(f"rl_actors_weights_{rank}_{number}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.data_offset + (0 if place.on_gpu else max(layout.num_bytes, 1)))
        # _map allocates every page now (MAP_POPULATE). Otherwise the first write would be slowed down by a page fault for each page.
        self.memory = _map(self.fd, mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory[: HEAD.size] = HEAD.pack(MAGIC, self.token, len(text), self.data_offset, layout.num_bytes)
        self.memory[PAGE : PAGE + len(text)] = text
        self.on_gpu: cuda_ipc.DeviceMemory | None = None
        if place.on_gpu:
            self.on_gpu = cuda_ipc.DeviceMemory(layout.num_bytes, device)
            self.data = self.on_gpu.data
        else:
            self.data = _bytes_of(self.memory, self.data_offset, layout.num_bytes)
        if place.pinned:
            pin_for(self, self.data, read_only=False)
        self.views = layout.views(self.data)

    @property
    def key(self) -> str:
        """Key of the version that the slot holds, or "" if the slot holds no complete version."""
        return _key_in(self.memory)

    @key.setter
    def key(self, key: str) -> None:
        encoded = key.encode()
        if len(encoded) > 255:
            raise ValueError(f"the key {key!r} has {len(encoded)} bytes; a slot has room for 255")
        self.memory[KEY_OFFSET] = 0
        self.memory[KEY_OFFSET + 1 : KEY_OFFSET + 1 + len(encoded)] = encoded
        self.memory[KEY_OFFSET] = len(encoded)

    def require(self, key: str) -> None:
        """Raises VersionGoneError if the slot does not hold the complete version with this key."""
        _require(self.memory, key, f"slot {self.number} of trainer rank {self.rank} (pid {os.getpid()})")

    @contextlib.contextmanager
    def writing(self, key: str, timeout: float) -> Iterator[None]:
        """Context manager that holds the exclusive lock. The body writes the slot. During the body the slot has no key. If the body raises no error,
        the slot then gets this key.

        Raises TimeoutError if readers hold the slot for more than `timeout` seconds. The error names these processes.
        """
        with self._locked(key, timeout):
            yield
            self.key = key

    @contextlib.contextmanager
    def _locked(self, key: str, timeout: float) -> Iterator[None]:
        """Context manager that holds the exclusive lock. It removes the key at the beginning, so that no later reader finds a version in the slot."""
        what = f"push of {key}: {actor_name()}, rank {self.rank}: lock of slot {self.number}"
        with flock(self.fd, fcntl.LOCK_EX, timeout, what):
            self.key = ""
            yield

    def end(self, key: str, timeout: float) -> None:
        """Wait until no reader uses the slot, and remove the key, so that a later reader gets a VersionGoneError.

        Call this before the slot is dropped, because GPU memory of the slot is freed when the slot is dropped.

        key: key of the push that drops the slot, for error texts.
        """
        with self._locked(key, timeout):
            pass

    def address(self, server: tuple[str, int] | None) -> SlotAddress:
        return SlotAddress(
            rank=self.rank,
            slot=self.number,
            machine=machine(),
            pid=os.getpid(),
            fd=self.fd,
            token=self.token,
            num_bytes=self.layout.num_bytes,
            address=server,
            weights_on_gpu=self.device.type == "cuda",
            gpu="" if self.on_gpu is None else cuda_ipc.gpu_id(self.data.device),
            handle=b"" if self.on_gpu is None else self.on_gpu.handle,
        )


class MappedSlot:
    """A reader's side of a slot. If the slot is in the host's memory, the reader can read it even after the writer has died."""

    def __init__(self, address: SlotAddress) -> None:
        """Raises VersionGoneError if the writer has ended or has dropped the slot. Raises PermissionError if this process may not open the
        writer's memory."""
        self.address = address
        try:
            self.fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise VersionGoneError(f"{address} is gone: the trainer's process has ended or dropped the slot") from None
        weakref.finalize(self, os.close, self.fd)
        head = os.pread(self.fd, HEAD.size, 0)
        fields = HEAD.unpack(head) if len(head) == HEAD.size else (b"", b"", 0, 0, 0)
        magic, token, layout_bytes, data_offset, num_bytes = fields
        if magic != MAGIC or token != address.token:
            raise VersionGoneError(f"{address} is gone: its pid and file descriptor now belong to another file")
        # As long as the memory is mapped only for reading, a write by mistake ends this process, and does not change what other
        # readers see. _host_bytes maps the memory for writing, too, if CUDA cannot pin it otherwise.
        self.memory = _map(self.fd, mmap.PROT_READ)
        self.layout = Layout.from_json(self.memory[PAGE : PAGE + layout_bytes])
        self.on_gpu: cuda_ipc.OpenedMemory | None = None
        if address.handle:
            self.on_gpu = cuda_ipc.OpenedMemory(address.handle, num_bytes, address.gpu)
            self.data = self.on_gpu.data
        else:
            self.data = self._host_bytes(data_offset, num_bytes)
        self.views = self.layout.views(self.data)

    def _host_bytes(self, offset: int, num_bytes: int) -> Tensor:
        """The bytes of the tensors. They are pinned if this process uses a GPU and CUDA can pin them."""
        data = _bytes_of(self.memory, offset, num_bytes)
        if torch.cuda.is_initialized() and not pin_for(self, data, read_only=True):
            # Not every driver pins memory that is mapped only for reading, so map the memory again, for reading and writing.
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self.memory = _map(fd, mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(fd)
            data = _bytes_of(self.memory, offset, num_bytes)
            if not pin_for(self, data, read_only=False):
                logger.info(
                    "CUDA could not pin the memory of %s, so copies from this memory to the GPU take about four times as long",
                    self.address,
                )
        return data

    @contextlib.contextmanager
    def reading(self, key: str, timeout: float) -> Iterator[None]:
        """Context manager that holds a shared lock, so that the version with this key stays in the slot.

        Raises VersionGoneError if the slot no longer holds the version, and TimeoutError if the lock is not free within `timeout` seconds.
        """
        with shared_lock(self.fd, timeout, f"pull of {key}: {actor_name()}: lock of {self.address}"):
            _require(self.memory, key, str(self.address))
            yield


def _map(fd: int, access: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access)


def _bytes_of(memory: mmap.mmap, offset: int, num_bytes: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=offset)[:num_bytes]


def pin_for(owner: object, data: Tensor, *, read_only: bool) -> bool:
    """Pin `data` for as long as `owner` lives. Returns False if the memory could not be pinned (see cuda_ipc.pin)."""
    pinned = cuda_ipc.pin(data, read_only=read_only)
    if pinned:
        weakref.finalize(owner, cuda_ipc.unpin, data.data_ptr())
    return pinned


class Mappings:
    """The slots that this process has mapped. A slot is mapped when a version is first read from it, and stays mapped for later versions."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.num_versions = 0
        # Token of a slot -> (the slot, the number of the last version that used the slot).
        self.slots: dict[bytes, tuple[MappedSlot, int]] = {}

    def of(self, addresses: tuple[SlotAddress, ...]) -> list[MappedSlot]:
        """The slots of one version. Unmaps the slots that none of the last KEPT_MAPPINGS versions used."""
        with self.guard:
            self.num_versions += 1
            found = []
            for address in addresses:
                slot, _ = self.slots.get(address.token) or (MappedSlot(address), 0)
                self.slots[address.token] = slot, self.num_versions
                found.append(slot)
            oldest = self.num_versions - KEPT_MAPPINGS
            self.slots = {token: (slot, used) for token, (slot, used) in self.slots.items() if used > oldest}
            return found


MAPPINGS = Mappings()


@contextlib.contextmanager
def shared_lock(fd: int, timeout: float, what: str) -> Iterator[None]:
    """Context manager that holds a shared lock on an open file. See `flock`."""
    # A flock belongs to one opening of a file. If two readers in this process shared one opening, the reader that ends first would release
    # the lock for both. So each reader opens the file again.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with flock(own, fcntl.LOCK_SH, timeout, what):
            yield
    finally:
        os.close(own)


@contextlib.contextmanager
def flock(fd: int, kind: int, timeout: float, what: str) -> Iterator[None]:
    """Context manager that holds a lock on an open file.

    Raises TimeoutError if the lock is not free within `timeout` seconds. The error names `what` and the processes that hold the lock.
    kind: fcntl.LOCK_SH or fcntl.LOCK_EX.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{what} was not free within {timeout:g} s; {_holders(fd)}") from None
            time.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _holders(fd: int) -> str:
    """A text that names the processes that hold a lock on a file now, as /proc/locks lists them: "it is held by pid 17, pid 18"."""
    inode = os.fstat(fd).st_ino
    pids = []
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            pids.append(f"pid {fields[4]}")
    return f"it is held by {', '.join(pids)}" if pids else "the process that held it has just released it"


def _require(memory: mmap.mmap, key: str, slot: str) -> None:
    held = _key_in(memory)
    if held != key:
        raise VersionGoneError(f"{key} is gone: {slot} holds {held or 'no complete version'}")


def _key_in(memory: mmap.mmap) -> str:
    length = memory[KEY_OFFSET]
    return memory[KEY_OFFSET + 1 : KEY_OFFSET + 1 + length].decode()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
