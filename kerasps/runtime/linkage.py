"""Finds where the libraries of this process store the address of a C function that they call.

A shared library calls a function of another one through a slot in its procedure linkage table.
Before the first call, the slot holds an address within the library; afterwards, that of the
function. The data that locate the slot are in memory: the headers of the ELF file, its symbols and
its relocations. So this module reads no file, which an update may have replaced by now. It checks
every address against the list of mapped memory before it reads there.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# The numbers are those of the ELF specification, <elf.h>.
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_LOAD, _DYNAMIC = 1, 2
_EXECUTABLE = 1
_PLT_SIZE, _HASH, _STRINGS, _SYMBOLS, _PLT_KIND, _PLT = 2, 4, 5, 6, 20, 23
_GNU_HASH = 0x6FFFFEF5
_RELA = 7
_RELA_BYTES = _SYMBOL_BYTES = 24
# The relocation that fills a slot, by the machine of the file.
_JUMP_SLOT = {62: 7, 183: 1026}  # x86-64, AArch64

_MAPS = Path("/proc/self/maps")
# A file that an update has replaced is still mapped, under its old name with this suffix.
_DELETED = " (deleted)"
_PROT_READ, _PROT_WRITE = 1, 2


class UnknownLayoutError(Exception):
    """Raised if a library is not laid out as this module expects; the text says how it differs."""


@dataclass(frozen=True)
class Region:
    """A part of this process's memory to which a file is mapped, from `start` up to `end`."""

    start: int
    end: int
    permissions: str
    offset: int
    path: str

    def holds(self, address: int, size: int = 1) -> bool:
        """Return whether this part contains all of the `size` bytes from `address` on."""
        return self.start <= address and address + size <= self.end


@dataclass(frozen=True)
class Slot:
    """The place where a library stores the address of a function."""

    library: str
    address: int
    # False if the loader has made it read-only.
    is_writable: bool
    # The parts of memory that contain the library's code.
    code: tuple[Region, ...]
    # The address of the function if the library defines it.
    defined_at: int | None = None

    def read(self) -> int:
        """Return the address that the slot holds."""
        return ctypes.c_uint64.from_address(self.address).value

    def write(self, value: int) -> None:
        """Store another address in the slot.

        Raises:
            OSError: the slot's memory cannot be made writable.
        """
        if self.is_writable:
            ctypes.c_uint64.from_address(self.address).value = value
            return
        with _made_writable(self.address):
            ctypes.c_uint64.from_address(self.address).value = value

    def is_unresolved(self) -> bool:
        """Return whether the library has not called the function yet."""
        return any(region.holds(self.read()) for region in self.code)


def find_slots(symbol: str, libraries: re.Pattern[str], *, is_imported: bool = True) -> list[Slot]:
    """Return the slots of a function in those libraries of this process that call it.

    Args:
        libraries: the pattern of the names of their files.
        is_imported: whether the function is in another library than the one that calls it. With
            False, find libraries that define it and call it through a slot.

    Raises:
        UnknownLayoutError: this system does not list mapped memory, or a library is not laid out as
            expected.
    """
    found = []
    for path, regions in _mapped_files(libraries).items():
        slot = _Library(path, regions).slot(symbol, is_imported=is_imported)
        if slot is not None:
            found.append(slot)
    return found


def _mapped_files(names: re.Pattern[str]) -> dict[str, list[Region]]:
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError as exc:
        raise UnknownLayoutError(f"{_MAPS} cannot be read ({exc.strerror})") from exc
    files: dict[str, list[Region]] = {}
    for line in lines:
        span, permissions, offset, _, _, *path = line.split(maxsplit=5)
        if path and names.search(path[0].removesuffix(_DELETED).rpartition("/")[2]):
            start, end = (int(bound, 16) for bound in span.split("-"))
            region = Region(start, end, permissions, int(offset, 16), path[0])
            files.setdefault(path[0], []).append(region)
    return files


class _Library:
    """A shared library, as the loader has mapped it."""

    def __init__(self, path: str, regions: list[Region]) -> None:
        self._path = path
        self._regions = [region for region in regions if "r" in region.permissions]
        self._start, self._bias, self._dynamic = self._loaded()

    def slot(self, symbol: str, *, is_imported: bool) -> Slot | None:
        """Return the slot of a function, None if the library has none for it."""
        if self._dynamic.get(_PLT_KIND, _RELA) != _RELA:
            self._fail("its relocations are of another kind")
        if _PLT not in self._dynamic:
            return None
        name = symbol.encode() + b"\0"
        index = self._undefined_symbol(name) if is_imported else self._defined_symbol(name)
        if index is None:
            return None
        relocations = self._read(self._table(_PLT), self._dynamic[_PLT_SIZE])
        # A relocation is an offset, a symbol with a kind, and an addend. There are some 170,000 in
        # TensorFlow's library; a search for the bytes of one takes 2 ms, a loop over all 0.2 s.
        wanted = struct.pack("<Q", (index << 32) | self._jump_slot)
        at = relocations.find(wanted)
        while at >= 0 and at % _RELA_BYTES != 8:
            at = relocations.find(wanted, at + 1)
        if at < 0:
            return None
        (offset,) = struct.unpack_from("<Q", relocations, at - 8)
        value = struct.unpack_from("<Q", self._symbol(index), 8)[0]
        return self._slot_at(self._bias + offset, None if is_imported else self._bias + value)

    def _slot_at(self, address: int, defined_at: int | None) -> Slot:
        region = next((region for region in self._regions if region.holds(address, 8)), None)
        if region is None or address % 8:
            self._fail("a slot is not where it should be")
        code = tuple(region for region in self._regions if "x" in region.permissions)
        return Slot(self._path, address, "w" in region.permissions, code, defined_at)

    def _loaded(self) -> tuple[int, int, dict[int, int]]:
        """Return the library's first address, the base of its relative addresses, and its tags.

        A file may be mapped more than once: only the loader maps its code as the headers say.
        """
        for region in self._regions:
            if region.offset == 0 and region.end - region.start >= 64:
                loaded = self._loaded_at(region.start)
                if loaded is not None:
                    return region.start, *loaded
        self._fail("its headers are not where they should be")

    def _loaded_at(self, start: int) -> tuple[int, dict[int, int]] | None:
        header = self._read(start, 64)
        if not header.startswith(_MAGIC):
            return None
        (machine,) = struct.unpack_from("<H", header, 18)
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        if machine not in _JUMP_SLOT or size != 56:
            self._fail(f"it is for a processor (ELF machine {machine}) that is not known here")
        self._jump_slot = _JUMP_SLOT[machine]
        headers = list(struct.iter_unpack("<IIQQQQQQ", self._read(start + table, size * count)))
        loads = [header for header in headers if header[0] == _LOAD]
        dynamic = next((header for header in headers if header[0] == _DYNAMIC), None)
        if not loads or dynamic is None:
            return None
        bias = start - loads[0][3] // mmap.PAGESIZE * mmap.PAGESIZE
        for _, flags, _, address, *_ in loads:
            if flags & _EXECUTABLE and not self._is_code(bias + address):
                return None
        tags: dict[int, int] = {}
        for tag, value in struct.iter_unpack("<QQ", self._read(bias + dynamic[3], dynamic[6])):
            tags.setdefault(tag, value)
        return bias, tags

    def _is_code(self, address: int) -> bool:
        return any(region.holds(address) and "x" in region.permissions for region in self._regions)

    def _undefined_symbol(self, name: bytes) -> int | None:
        """Return the index of a symbol that the library imports, None if it does not."""
        if _GNU_HASH in self._dynamic:
            # The symbols that the library defines come last: this table begins with the number of
            # buckets and the index of the first of them.
            _, count = struct.unpack("<II", self._read(self._table(_GNU_HASH), 8))
        elif _HASH in self._dynamic:
            _, count = struct.unpack("<II", self._read(self._table(_HASH), 8))
        else:
            self._fail("it does not say how many symbols it has")
        strings = self._table(_STRINGS)
        symbols = self._read(self._table(_SYMBOLS), count * _SYMBOL_BYTES)
        for index, (text, _, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
            if section == 0 and text and self._read(strings + text, len(name)) == name:
                return index
        return None

    def _defined_symbol(self, name: bytes) -> int | None:
        """Return the index of a symbol that the library defines, None if it does not."""
        if _GNU_HASH not in self._dynamic:
            self._fail("it has no table of the symbols that it defines")
        table, strings = self._table(_GNU_HASH), self._table(_STRINGS)
        num_buckets, first, num_words, _ = struct.unpack("<IIII", self._read(table, 16))
        buckets = table + 16 + 8 * num_words
        chains = buckets + 4 * num_buckets
        hashed = 5381
        for letter in name[:-1]:
            hashed = (33 * hashed + letter) & 0xFFFFFFFF
        (index,) = struct.unpack("<I", self._read(buckets + 4 * (hashed % num_buckets), 4))
        while index >= first:
            (found,) = struct.unpack("<I", self._read(chains + 4 * (index - first), 4))
            # The lowest bit marks the last symbol of a bucket.
            if found | 1 == hashed | 1:
                (text,) = struct.unpack_from("<I", self._symbol(index))
                if self._read(strings + text, len(name)) == name:
                    return int(index)
            if found & 1:
                return None
            index += 1
        return None

    def _symbol(self, index: int) -> bytes:
        return self._read(self._table(_SYMBOLS) + index * _SYMBOL_BYTES, _SYMBOL_BYTES)

    def _table(self, tag: int) -> int:
        if tag not in self._dynamic:
            self._fail(f"it has no table {tag}")
        address = self._dynamic[tag]
        # On most systems, the loader makes these addresses absolute.
        return address if address >= self._start else self._bias + address

    def _read(self, address: int, size: int) -> bytes:
        if not self._is_mapped(address, size):
            self._fail("a table is not where it should be")
        return ctypes.string_at(address, size)

    def _is_mapped(self, address: int, size: int) -> bool:
        # Adjacent parts may differ in their permissions, so the range may span several.
        end = address + size
        for region in self._regions:
            if region.start <= address < region.end:
                address = min(end, region.end)
        return address == end

    def _fail(self, how: str) -> NoReturn:
        raise UnknownLayoutError(f"{self._path}: {how}")


@contextmanager
def _made_writable(address: int) -> Iterator[None]:
    """In this context, make the page of an address writable."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    _protect(page, _PROT_READ | _PROT_WRITE)
    try:
        yield
    finally:
        _protect(page, _PROT_READ)


def _protect(page: int, protection: int) -> None:
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if mprotect(page, mmap.PAGESIZE, protection) != 0:
        raise OSError(ctypes.get_errno(), "memory cannot be made writable")
