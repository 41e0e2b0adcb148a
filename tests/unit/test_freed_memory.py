"""Tasks keep the memory that they free, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

# Takes and frees 64 MB ten times, as a step does; prints the pages that the kernel had to clear.
SCRIPT = """
import ctypes, resource, sys
from kerasps.cluster.serving.freed_memory import keep_freed_memory
keeps = keep_freed_memory() if sys.argv[1] == "keep" else None
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for number in range(11):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(2**24) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, 2**24)
    for block in blocks:
        libc.free(block)
print(keeps, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 2**26 // os.sysconf("SC_PAGE_SIZE")


def cleared(argument, **environment):
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    keeps, pages = out.split()
    return keeps, int(pages)


def test_freed_memory_is_used_again():
    keeps, pages = cleared("keep")
    assert keeps == "True"
    assert pages < PAGES / 100
    assert cleared("leave")[1] > PAGES / 4


def test_what_the_environment_says_stays():
    keeps, pages = cleared("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert keeps == "False"
    assert pages > PAGES / 4
