"""Read initialized 32-bit globals of a kernel from a cubin (an ELF file), without a GPU."""

from __future__ import annotations

import struct


def read_u32(cubin: bytes, name: str) -> int | None:
    """Return the value of an initialised 4-byte global or constant, or None when there is no such symbol."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not a cubin")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count = struct.unpack_from("<HH", cubin, 0x3A)
    # name, type, flags, address, offset, size, link, info, align, entry size
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)
    ]
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            label, _, _, index, value, size = struct.unpack_from("<IBBHQQ", cubin, at)
            end = cubin.index(b"\0", strings + label)
            if cubin[strings + label : end] != name.encode() or size != 4 or not 0 < index < count:
                continue
            return int(struct.unpack_from("<I", cubin, sections[index][4] + value)[0])
    return None
