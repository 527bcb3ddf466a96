"""Runs a command that dies with the process that started it: `python -I -S tether.py PARENT_PID COMMAND ...`.

Started as a plain file, so it must import nothing of Laneway. The kernel's parent-death signal survives `exec`; only
the tie itself needs a process of its own, since a hook between fork and exec is unsafe in a process with threads.
The signal is SIGKILL: a parent that vanished can no longer wait for a clean end.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the tie was made
        os._exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
