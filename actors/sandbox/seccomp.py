"""System calls that a confined program may not make, as a classic BPF filter.

The filter answers EPERM to them, and ENOSYS to `clone3`, whose arguments a filter cannot see: the C
library then uses `clone`. Numbers are those of the kernel's tables (asm/unistd.h).
"""

import errno
import platform
import struct

# name: x86_64, aarch64
DENIED = {
    # what changes or escapes the confinement
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "fsopen": (430, 430)},
    **{"move_mount": (429, 429), "fsconfig": (431, 431), "fsmount": (432, 432)},
    **{"fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265)},
    **{"name_to_handle_at": (303, 264)},
    # what reaches into other processes, the interpreter that forks among them
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "kcmp": (312, 272)},
    **{"setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118)},
    **{"sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "ioprio_set": (251, 30)},
    # what outlives the program, or is memory that its limit does not count
    **{"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)},
    # large parts of the kernel that no program here needs
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"personality": (135, 92), "fanotify_init": (300, 262)},
}
CLONE, CLONE3, PRLIMIT, IOCTL = (56, 220), (435, 435), (302, 261), (16, 29)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
NAMESPACES = 0x7E020080  # every CLONE_NEW flag
AF_UNIX = 1
SETFLAGS, FSSETXATTR = 0x40086602, 0x401C5820  # of ioctl: flags that a file keeps, as /tmp would

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets into struct seccomp_data
X32 = 0x40000000  # a second table of x86_64, in which the same calls have other numbers


def instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode one `struct sock_filter`; `then` and `otherwise` count instructions to skip."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def program(machine: str = platform.machine()) -> bytes:
    """Build the filter for this machine type; ValueError for an unknown one."""
    if machine not in ARCHITECTURES:
        raise ValueError(f"seccomp: no table of system calls for {machine}")
    column = list(ARCHITECTURES).index(machine)
    deny = instruction(RETURN, ERROR | errno.EPERM)
    parts = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, ARCHITECTURES[machine], then=1),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        parts += [instruction(AT_LEAST, X32, otherwise=1), deny]
    for numbers in DENIED.values():
        parts += [instruction(EQUAL, numbers[column], otherwise=1), deny]
    parts += [
        instruction(EQUAL, CLONE3[column], otherwise=1),
        instruction(RETURN, ERROR | errno.ENOSYS),
    ]
    for numbers, argument, test, value, denied_if in (
        (CLONE, FIRST, ANY_BIT, NAMESPACES, True),
        (SOCKET, FIRST, EQUAL, AF_UNIX, False),
        (SOCKETPAIR, FIRST, EQUAL, AF_UNIX, False),
        (PRLIMIT, FIRST, EQUAL, 0, False),  # the limits of oneself only
        (IOCTL, SECOND, EQUAL, SETFLAGS, True),
        (IOCTL, SECOND, EQUAL, FSSETXATTR, True),
    ):
        parts += [
            instruction(EQUAL, numbers[column], otherwise=4),
            instruction(LOAD, argument),
            instruction(test, value, otherwise=1) if denied_if else instruction(test, value, 1),
            deny,
            instruction(LOAD, NUMBER),
        ]
    return b"".join([*parts, instruction(RETURN, ALLOW)])
