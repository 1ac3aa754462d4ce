"""A program that takes over process 1 of its cage, so that it need not end with its host.

It unsets that process's death signal by ptrace, and has it say that the program has ended. What is
left of it says so in the file `alive`, and replaces the hidden tests once they are there.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

SEIZE, INTERRUPT, GET, SET, STEP, DETACH = 0x4206, 0x4207, 12, 13, 9, 17
REGISTERS = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp"
OPEN, TAKE = 434, 438
TESTS = Path("tests/check.sh")

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Registers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in [*REGISTERS.split(), "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"]
    ]


def trace(request: int, data: int = 0) -> None:
    if libc.ptrace(request, 1, 0, data):
        sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")


def unset_death_signal() -> None:
    """Have process 1 call prctl(PR_SET_PDEATHSIG, 0), where it waits, and then wait again."""
    trace(SEIZE)
    trace(INTERRUPT)
    os.waitpid(1, 0x40000000)
    old, new = Registers(), Registers()
    trace(GET, ctypes.addressof(old))
    ctypes.memmove(ctypes.addressof(new), ctypes.addressof(old), ctypes.sizeof(old))
    new.rip, new.rax, new.rdi, new.orig_rax = old.rip - 2, 157, 1, 2**64 - 1
    new.rsi = new.rdx = new.r10 = new.r8 = 0
    trace(SET, ctypes.addressof(new))
    trace(STEP)
    os.waitpid(1, 0x40000000)
    old.rip, old.rax = old.rip - 2, old.orig_rax if old.orig_rax < 2**63 else 61
    old.orig_rax = 2**64 - 1
    trace(SET, ctypes.addressof(old))
    trace(DETACH)


def live_on() -> None:
    os.setsid()
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    with Path("alive").open("a") as alive:
        for _ in range(2000):
            print(time.time(), TESTS.exists(), file=alive, flush=True)
            if TESTS.exists():
                TESTS.write_text("true\n")
            time.sleep(0.005)
    os._exit(0)


Path("begun").touch()
unset_death_signal()
if os.fork() == 0:
    live_on()
time.sleep(0.3)
first = libc.syscall(OPEN, 1, 0)
for number in range(3, 30):
    if (taken := libc.syscall(TAKE, first, number, 0)) >= 0:
        os.write(taken, (1).to_bytes(8, sys.byteorder))
time.sleep(30)
