"""Trains a table in files in a process that may not use io_uring; test_file_tables_systems.py.

python without_io_uring.py FOLDER
"""

import ctypes
import errno
import pathlib
import struct
import sys

from file_pairs import train_flush_and_compare

# linux/prctl.h, linux/seccomp.h, linux/filter.h. The call has this number on x86-64 and on ARM.
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FAIL, _ALLOW = 0x00050000, 0x7FFF0000
IO_URING_SETUP = 425


def forbid(call: int) -> None:
    """Makes a system call fail with EPERM in all later threads. Many containers do the same."""
    code = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 1, call),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    assert libc.syscall(call, 1, None) == -1
    assert ctypes.get_errno() == errno.EPERM


if __name__ == "__main__":
    forbid(IO_URING_SETUP)
    train_flush_and_compare(pathlib.Path(sys.argv[1]))
