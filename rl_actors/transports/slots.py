"""Slots and their locks. A slot is shared memory with one rank's part of a version of the weights.

It is a memfd, so the kernel frees it with the last process that has it open, even after kill -9,
and the size of /dev/shm is no limit. Readers open it as /proc/<pid>/fd/<number>. The writer holds
an exclusive flock, readers a shared one; the kernel releases the locks of the dead.

The first page has the key of the version ("<stream>/7"), then come the layout as JSON and the
tensors. Tensors on a GPU are not in the memfd.
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
ALIGNMENT = 64  # bytes; every tensor begins at a multiple
HEAD = struct.Struct("<8s16sQQQ")
"""Magic, token, bytes of the layout, offset and bytes of the tensors."""
MAGIC = b"rlweight"
KEY_OFFSET = 64  # one byte with the key's length, then the key
LOCK_POLL_SECONDS = 0.002
KEPT_MAPPINGS = 3
"""After this many versions from other slots a reader unmaps a slot. A rank alternates between two."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor, and its place in a slot."""

    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # indices of the part's first value in the whole tensor
    size: tuple[int, ...]  # shape of the part
    dtype: torch.dtype
    offset: int  # bytes from the start of the slot's tensors

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Tensor name -> this rank's part, in the order in which the parts lie in the slot."""

    shards: Mapping[str, Shard]
    num_bytes: int  # with the padding between parts

    def to_json(self) -> bytes:
        rows = []
        for name, shard in self.shards.items():
            dtype = str(shard.dtype).removeprefix("torch.")
            rows.append([name, shard.shape, shard.start, shard.size, dtype, shard.offset])
        return json.dumps({"num_bytes": self.num_bytes, "shards": rows}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "SlotLayout":
        values = json.loads(text)
        shards = {}
        for name, shape, start, size, dtype, offset in values["shards"]:
            shards[name] = Shard(tuple(shape), tuple(start), tuple(size), getattr(torch, dtype), offset)
        return cls(shards, values["num_bytes"])

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """The parts as views of the slot's bytes."""
        views = {}
        for name, shard in self.shards.items():
            part = data[shard.offset : shard.offset + shard.num_bytes]
            views[name] = part.view(shard.dtype).view(shard.size)
        return views


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAddress:
    """How another process finds a slot."""

    rank: int  # of the trainer
    slot: int  # among this rank's slots
    host_id: str  # host_id() of the rank
    pid: int
    fd: int
    token: bytes = b""  # identifies the slot: a later process may have the same pid and fd
    num_bytes: int  # of the tensors
    address: tuple[str, int] | None = None  # host and port of the rank's server, if any
    weights_on_gpu: bool = False  # even then the slot may be in the host's memory
    # of a slot on a GPU: UUID and CUDA IPC handle
    gpu: str = ""
    handle: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return f"slot {self.slot} of trainer rank {self.rank} (pid {self.pid})"


class VersionGoneError(RuntimeError):
    """The slot no longer holds the version, or the trainer has dropped the slot or has ended."""


def host_id() -> str:
    """Boot id and pid namespace. Processes with the same value see each other in /proc."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def actor_name() -> str:
    """This process in error texts: "trainer-1 (pid 17)", or "pid 17" of another program."""
    name = os.environ.get("RL_ACTORS_PROCESS")
    return f"{name} (pid {os.getpid()})" if name else f"pid {os.getpid()}"


class Slot:
    """The writer's side of a slot. The constructor allocates all its memory."""

    def __init__(self, layout: SlotLayout, *, rank: int, number: int, place: Place, device: torch.device) -> None:
        """device: of the weights, and of the slot's tensors if place.on_gpu."""
        self.layout = layout
        self.rank = rank
        self.number = number
        self.device = device
        text = layout.to_json()
        self.data_offset = -(-(PAGE + len(text)) // PAGE) * PAGE  # the next whole page
        self.token = secrets.token_bytes(16)
        self.fd = os.memfd_create(f"rl_actors_weights_{rank}_{number}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.data_offset + (0 if place.on_gpu else max(layout.num_bytes, 1)))
        # MAP_POPULATE allocates every page now, otherwise the first write would pay the page faults
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
        """Key of the version in the slot, "" if it holds no complete version."""
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
        """Raises VersionGoneError if the slot does not hold this complete version."""
        _require(self.memory, key, f"slot {self.number} of trainer rank {self.rank} (pid {os.getpid()})")

    @contextlib.contextmanager
    def writing(self, key: str, timeout: float) -> Iterator[None]:
        """Hold the exclusive lock; if the body succeeds, the slot gets this key.

        Raises TimeoutError naming the readers that hold the slot for more than `timeout` seconds.
        """
        with self._locked(key, timeout):
            yield
            self.key = key

    @contextlib.contextmanager
    def _locked(self, key: str, timeout: float) -> Iterator[None]:
        what = f"push of {key}: {actor_name()}, rank {self.rank}: lock of slot {self.number}"
        with flock(self.fd, fcntl.LOCK_EX, timeout, what):
            self.key = ""
            yield

    def end(self, key: str, timeout: float) -> None:
        """Wait for the readers; dropping the slot then frees its GPU memory. key: of this push."""
        with self._locked(key, timeout):
            pass

    def address(self, server: tuple[str, int] | None) -> SlotAddress:
        return SlotAddress(
            rank=self.rank,
            slot=self.number,
            host_id=host_id(),
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
    """A reader's side of a slot. Host memory stays readable after the writer's death."""

    def __init__(self, address: SlotAddress) -> None:
        """Raises VersionGoneError, or PermissionError if this process may not open the memory."""
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
        # read-only, so that a stray write ends this process instead of changing what other readers
        # see
        self.memory = _map(self.fd, mmap.PROT_READ)
        self.layout = SlotLayout.from_json(self.memory[PAGE : PAGE + layout_bytes])
        self.on_gpu: cuda_ipc.OpenedMemory | None = None
        if address.handle:
            self.on_gpu = cuda_ipc.OpenedMemory(address.handle, num_bytes, address.gpu)
            self.data = self.on_gpu.data
        else:
            self.data = self._host_bytes(data_offset, num_bytes)
        self.views = self.layout.views(self.data)

    def _host_bytes(self, offset: int, num_bytes: int) -> Tensor:
        """The bytes of the tensors, pinned if this process uses a GPU and CUDA can pin them."""
        data = _bytes_of(self.memory, offset, num_bytes)
        if torch.cuda.is_initialized() and not pin_for(self, data, read_only=True):
            # not every driver pins read-only mappings
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
        """Hold a shared lock. Raises VersionGoneError without the version, or TimeoutError."""
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
    """Pin `data` for the life of `owner`. False as in cuda_ipc.pin."""
    pinned = cuda_ipc.pin(data, read_only=read_only)
    if pinned:
        weakref.finalize(owner, cuda_ipc.unpin, data.data_ptr())
    return pinned


class Mappings:
    """Mapped slots, kept for later versions."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.num_versions = 0
        # token -> (slot, number of the last version that used it)
        self.slots: dict[bytes, tuple[MappedSlot, int]] = {}

    def of(self, addresses: tuple[SlotAddress, ...]) -> list[MappedSlot]:
        """Unmaps the slots that none of the last KEPT_MAPPINGS versions used."""
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
    # A flock belongs to one opening: readers that shared it would release each other's lock.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with flock(own, fcntl.LOCK_SH, timeout, what):
            yield
    finally:
        os.close(own)


@contextlib.contextmanager
def flock(fd: int, kind: int, timeout: float, what: str) -> Iterator[None]:
    """kind: LOCK_SH or LOCK_EX of fcntl. Raises TimeoutError naming `what` and the holders."""
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
    """The holders of a file's lock, from /proc/locks: "it is held by pid 17, pid 18"."""
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
